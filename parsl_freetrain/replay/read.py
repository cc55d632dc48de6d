"""Reads any kind of trace: idle intervals as CSV, job logs, or a synthetic schedule."""

import math
import re
from pathlib import Path

import numpy as np

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import read_zipped
from parsl_freetrain.replay import accounting_pbs
from parsl_freetrain.replay.accounting_pbs import read_pbs
from parsl_freetrain.replay.accounting_slurm import read_sacct
from parsl_freetrain.replay.job_table_holes import PATIENCE_S, holes
from parsl_freetrain.replay.swf import read_swf
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.sites.idle_schedule import Schedule, read_schedule
from parsl_freetrain.sites.synthetic_schedule import SUMMIT_IDLE_SHARE, SUMMIT_NODES, generate

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
    """The idle intervals in a file of any kind, plain or gzipped: CSV, a job log in Standard
    Workload Format, of ``sacct --parsable2``, or of PBS. ``nodes, since, until``: see
    :meth:`Trace.window`; the clock of a job log begins with its first submission, its window with
    the first start. ``machine_nodes``: where a job log lacks it; ``patience_s``: see
    :func:`~.job_table_holes.holes`. Raises BadInput, with file and line.
    """
    if (kind := kind_of(path)) != 'idle':
        whole = holes(_READERS[kind](path, machine_nodes), patience_s)
        if nodes is None and since is None and until is None:
            return whole
    elif machine_nodes is None:
        whole = of_schedule(read_schedule(path))
    else:
        raise BadInput(
            f'{path} has idle intervals; machine_nodes={machine_nodes} goes with job logs only.'
        )
    try:
        return whole.window(nodes, since, until)
    except BadInput as error:
        raise BadInput(f'{path}: {error}') from None


def kind_of(path: str | Path) -> str:
    """``'swf'``, ``'sacct'``, ``'pbs'`` or else ``'idle'``; BadInput if there is no such file."""
    data = read_zipped(path, 'idle intervals, or a job log', most=1 << 16)
    lines = data.decode('utf-8-sig', errors='replace').splitlines()
    first = next(filter(None, map(str.strip, lines)), '')
    if _SWF.fullmatch(first):
        return 'swf'
    if accounting_pbs.RECORD.fullmatch(first):
        return 'pbs'
    return 'sacct' if '|' in first else 'idle'


WEEK_S = 7 * 86_400.0


def synthetic(
    seed: int,
    nodes: int = SUMMIT_NODES,
    duration_s: float = WEEK_S,
    idle_share: float = SUMMIT_IDLE_SHARE,
) -> Trace:
    """A made-up trace with Summit's statistics, the same for the same arguments."""
    schedule = generate(nodes, duration_s, seed, idle_share=idle_share)
    names = tuple(f'node{i:04d}' for i in range(nodes))
    place = {name: i for i, name in enumerate(names)}
    index = np.array([place[name] for name in schedule.nodes], dtype=np.int64)[schedule.node_index]
    unknown = np.full(len(schedule), math.inf)
    return Trace(names, 0.0, duration_s, schedule.starts, schedule.ends, index, unknown)


def of_schedule(schedule: Schedule) -> Trace:
    """The trace of a schedule, from 0 to its last end; raises BadInput where it is empty."""
    return Trace(
        schedule.nodes,
        0.0,
        schedule.end_s,
        schedule.starts,
        schedule.ends,
        schedule.node_index,
        np.full(len(schedule), math.inf),
        tuple(schedule.node_classes[node] for node in schedule.nodes if schedule.node_classes),
    )
