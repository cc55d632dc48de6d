"""Reads every kind of trace; the first line of a file tells its kind."""

from __future__ import annotations

import re
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay import accounting_pbs
from parsl_freetrain.replay.accounting_pbs import read_pbs
from parsl_freetrain.replay.accounting_slurm import read_sacct
from parsl_freetrain.replay.idle import part_of, read_idle
from parsl_freetrain.replay.job_table_holes import PATIENCE_S, holes
from parsl_freetrain.replay.swf import read_swf
from parsl_freetrain.replay.trace import Trace, read_bytes

# A job in Standard Workload Format: more numbers than an idle interval has columns.
_SWF = re.compile(r';.*|\s*-?[\d.]+(\s+-?[\d.]+){4,}\s*')
_READERS = {'swf': read_swf, 'sacct': read_sacct, 'pbs': read_pbs}


def read_trace(
    path: str | Path,
    nodes: int | None = None,
    since: float | None = None,
    until: float | None = None,
    *,
    machine_nodes: int | None = None,
    patience_s: float = PATIENCE_S,
) -> Trace:
    """The idle intervals in a file of any kind, plain or gzipped: idle intervals as CSV, a job log
    in Standard Workload Format, the output of ``sacct --parsable2``, or an accounting log of PBS.

    ``nodes, since, until``: the part to read, see :meth:`Trace.window`. The clock of a job log
    begins with its first submission; its window goes from the first start to the last one. For job
    logs: ``machine_nodes``, the machine's, if the log does not give it or is wrong; ``patience_s``
    as for :func:`~.job_table_holes.holes`. Raises BadInput, with file and line, for invalid files.
    """
    kind = kind_of(path)
    if kind == 'idle':
        if machine_nodes is not None:
            raise BadInput(
                f'{path} has idle intervals; machine_nodes={machine_nodes} goes with job logs only.'
            )
        return read_idle(path, nodes, since, until)
    whole = holes(_READERS[kind](path, machine_nodes), patience_s)
    if nodes is None and since is None and until is None:
        return whole
    return part_of(path, whole, nodes, since, until)


def kind_of(path: str | Path) -> str:
    """``'swf'``, ``'sacct'``, ``'pbs'`` or else ``'idle'``; BadInput if there is no such file."""
    data = read_bytes(path, 'idle intervals, or a job log', most=1 << 16)
    lines = data.decode('utf-8-sig', errors='replace').splitlines()
    first = next(filter(None, map(str.strip, lines)), '')
    if _SWF.fullmatch(first):
        return 'swf'
    if accounting_pbs.RECORD.fullmatch(first):
        return 'pbs'
    return 'sacct' if '|' in first else 'idle'
