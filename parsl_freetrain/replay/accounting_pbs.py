"""The accounting logs of PBS Pro and OpenPBS: ``date time;record;job;key=value key=value …``."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.job_table import Job, JobTable, at_line, job_table, read_lines
from parsl_freetrain.sites.batch.records import seconds_of
from parsl_freetrain.sites.pbspro.answers import hosts_of

WHAT = 'accounting logs of PBS (lines "MM/DD/YYYY HH:MM:SS;E;job;key=value …")'

RECORD = re.compile(r'\d\d/\d\d/\d{4} \d\d:\d\d:\d\d;(\w+);([^;]*);(.*)')
_PAIR = re.compile(r'([\w.]+)=("[^"]*"|\S*)')
_Record = tuple[str | Path, int, dict[str, str], bool]  # file, line, values, and whether it ended
_START, _ENDS = 'S', ('E', 'R')  # records: a job started, ended, or was requeued (and so ended)


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
    over: list[_Record] = []
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
            values = {key: value.strip('"') for key, value in _PAIR.findall(found[3])}
            if kind == _START:
                going_on[job] = path, number, values, False
            elif kind == 'E' or 'end' in values:
                going_on.pop(job, None)
                over.append((path, number, values, True))
    jobs = []
    for path, number, values, ended in (*over, *going_on.values()):
        with at_line(path, number):
            jobs.append(_job(number, values, ended))
    return job_table(files[0] if files else '', jobs, machine_nodes)


def _job(line: int, values: dict[str, str], ended: bool) -> Job:
    def number(key: str) -> float:
        if (text := values.get(key)) is None:
            raise ValueError(f'the record has no {key}')
        if not text.isdecimal():
            raise ValueError(f'{key} is {text!r}; it must be a whole number')
        return float(text)

    end, start = number('end') if ended else math.inf, number('start')
    waits = next((key for key in ('etime', 'qtime', 'ctime') if values.get(key)), 'qtime')
    where_it_ran = values.get('exec_host') or values.get('exec_vnode', '')
    names = hosts_of(where_it_ran.replace('/', ':'))  # exec_host is n1/0*24+n2/0*24
    nodes = len(names) or int(number('Resource_List.nodect'))
    limit = values.get('Resource_List.walltime', '')
    try:
        requested = seconds_of(limit) if limit else math.inf
    except ValueError:
        wrong = f'Resource_List.walltime is {limit!r}; it must be hours:minutes:seconds'
        raise ValueError(wrong) from None
    return Job(line, number(waits), start, end, nodes, requested, names)
