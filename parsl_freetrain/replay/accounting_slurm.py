"""Slurm's accounting, as ``sacct --parsable2`` prints it."""

import math
import re
from datetime import UTC, datetime
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.job_table import Job, JobTable, at_line, job_table, read_lines
from parsl_freetrain.sites.slurm.answers_text import duration_s
from parsl_freetrain.sites.slurm.words import expand

WHAT = (
    'what sacct --allusers --parsable2 '
    '--format=JobIDRaw,Submit,Eligible,Start,End,NNodes,Timelimit,NodeList prints'
)

# The columns, or others that say the same.
_NEEDED = (
    *(('Submit',), ('Start',), ('End',), ('NNodes', 'AllocNodes')),
    *(('Timelimit', 'TimelimitRaw'), ('JobIDRaw', 'JobID')),
)
_UNKNOWN = ('', 'unknown', 'none', 'n/a')
_NO_NODES = ('', 'none assigned', 'none', 'unknown', 'n/a', '(null)')


def read_sacct(path: str | Path, machine_nodes: int | None = None) -> JobTable:
    """Read the jobs that ``sacct --parsable2`` prints, plain or gzipped, with its header line.
    Columns are found by name: ``Submit, Start, End``, ``NNodes`` or ``AllocNodes``, ``Timelimit``
    or ``TimelimitRaw``, ``JobIDRaw`` or ``JobID``, and where given ``NodeList`` and ``Eligible``.
    Times are in ISO 8601 (without a zone: no summer time) or seconds since the epoch. Steps are
    left out. ``machine_nodes``: of the machine; None: those in the node lists. Raises BadInput,
    with file and line.
    """
    lines = read_lines(path, WHAT)
    rows = [(number, line.split('|')) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BadInput(f'{path} is empty; give {WHAT}.')
    head, header = rows[0]
    header = [name.strip() for name in header]
    with at_line(path, head):
        for either in _NEEDED:
            if not set(either) & set(header):
                raise ValueError(f'there is no column {" or ".join(either)}; give {WHAT}')
    jobs = []
    for number, fields in rows[1:]:
        with at_line(path, number):
            if len(fields) != len(header):
                raise ValueError(f'{len(fields)} columns where the header has {len(header)}')
            row = dict(zip(header, (field.strip() for field in fields), strict=True))
            if '.' not in (row.get('JobIDRaw') or row.get('JobID', '')):  # else it is a step
                jobs.append(_job(number, row))
    return job_table(path, jobs, machine_nodes)


def _job(number: int, row: dict[str, str]) -> Job:
    submit, start, end = (_time(name, row[name]) for name in ('Submit', 'Start', 'End'))
    if submit is None:
        raise ValueError(f'Submit is {row["Submit"]!r}; it must be a time')
    eligible = _time('Eligible', row.get('Eligible', ''))
    end = math.inf if end is None else end
    start = end if start is None else start  # never started: it waited to its end
    if eligible is not None and submit < eligible <= start:
        submit = eligible
    names = () if row.get('NodeList', '').lower() in _NO_NODES else expand(row['NodeList'])
    nodes = len(names) or _count(row.get('NNodes') or row.get('AllocNodes', ''))
    return Job(number, submit, start, end, nodes, _limit(row), names)


def _time(name: str, text: str) -> float | None:
    if text.lower() in _UNKNOWN:
        return None
    if text.isdecimal():
        return float(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f'{name} is {text!r}; it must be a time such as 2026-01-31T12:00:00, or Unknown'
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _limit(row: dict[str, str]) -> float:
    raw = row.get('TimelimitRaw', '')
    if raw.isdecimal():  # minutes
        return 60 * float(raw)
    text = row.get('Timelimit', '')
    unlimited = text.upper() in ('PARTITION_LIMIT', 'UNKNOWN', 'NONE')
    if unlimited or (found := duration_s(text)) is None:
        return math.inf
    return found


def _count(text: str) -> int:
    found = re.fullmatch(r'(\d+(?:\.\d+)?)(K?)', text)
    if found is None:
        raise ValueError(f'the number of nodes is {text!r}; it must be a whole number')
    return int(float(found[1]) * (1024 if found[2] else 1))
