"""The accounting logs of PBS Pro and OpenPBS: ``date time;record;job;key=value key=value …``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.job_table import Job, JobTable, job_table, read_lines
from parsl_freetrain.sites.pbspro.answers import hosts_of

WHAT = 'accounting logs of PBS (lines "MM/DD/YYYY HH:MM:SS;E;job;key=value …")'

RECORD = re.compile(r'\d\d/\d\d/\d{4} \d\d:\d\d:\d\d;(\w+);([^;]*);(.*)')
_PAIR = re.compile(r'([\w.]+)=("[^"]*"|\S*)')
_START, _ENDS = 'S', ('E', 'R')  # records: a job started, ended, or was requeued (and so ended)


@dataclass(frozen=True)
class _Record:
    path: str | Path
    line: int
    values: dict[str, str]

    @property
    def where(self) -> str:
        return f'{self.path}, line {self.line}'

    def number(self, key: str) -> float:
        text = self.values.get(key)
        if text is None:
            raise BadInput(f'{self.where}: the record has no {key}.')
        if not text.isdecimal():
            raise BadInput(f'{self.where}: {key} is {text!r}; it must be a whole number.')
        return float(text)


def read_pbs(
    paths: str | Path | Sequence[str | Path], machine_nodes: int | None = None
) -> JobTable:
    """Read the jobs of PBS accounting logs, plain or gzipped; several files are one log, in order
    of their dates. A job is read from its ``E`` record (``R`` if it was requeued; with ``S`` alone
    it runs to the end), waits from ``etime`` or else ``qtime``, and has the nodes of ``exec_host``,
    ``exec_vnode``, or ``Resource_List.nodect``, and the limit ``Resource_List.walltime``.
    ``machine_nodes``: of the machine; None: those that jobs ran on. Raises BadInput, with file and
    line.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    going_on: dict[str, _Record] = {}
    jobs: list[Job] = []
    for path in files:
        for number, line in enumerate(read_lines(path, WHAT), 1):
            if not line.strip():
                continue
            found = RECORD.fullmatch(line.strip())
            if found is None:
                raise BadInput(f'{path}, line {number}: this is no record of PBS; give {WHAT}.')
            kind, job = found[1], found[2]
            if kind not in (_START, *_ENDS) or '[]' in job:  # an array has records of its own
                continue
            fields = {key: value.strip('"') for key, value in _PAIR.findall(found[3])}
            record = _Record(path, number, fields)
            if kind == _START:
                going_on[job] = record
            elif kind == 'E' or 'end' in record.values:
                going_on.pop(job, None)
                jobs.append(_job(record, record.number('end')))
    jobs += [_job(record, math.inf) for record in going_on.values()]
    return job_table(files[0] if files else '', jobs, machine_nodes)


def _job(record: _Record, end: float) -> Job:
    values = record.values
    start = record.number('start')
    waits = next((key for key in ('etime', 'qtime', 'ctime') if values.get(key)), 'qtime')
    names = _hosts(values.get('exec_host', '')) or hosts_of(values.get('exec_vnode', ''))
    nodes = len(names) or int(record.number('Resource_List.nodect'))
    limit = values.get('Resource_List.walltime', '')
    try:
        requested = _seconds(limit) if limit else math.inf
    except ValueError:
        raise BadInput(
            f'{record.where}: Resource_List.walltime is {limit!r}; it must be '
            'hours:minutes:seconds.'
        ) from None
    return Job(record.line, record.number(waits), start, end, nodes, requested, names)


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.partition('/')[0] for part in text.split('+') if part))


def _seconds(text: str) -> float:
    parts = [int(part) for part in text.split(':')]
    if len(parts) > 3 or min(parts) < 0:
        raise ValueError(text)
    return float(sum(part * 60**power for power, part in enumerate(reversed(parts))))
