"""Job logs in the Standard Workload Format of the Parallel Workloads Archive."""

import logging
import math
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.job_table import (
    LONGEST_S,
    Job,
    JobTable,
    at_line,
    job_table,
    read_lines,
)

logger = logging.getLogger(__name__)

COLUMNS = (
    'job number',
    'submit time',
    'wait time',
    'run time',
    'allocated processors',
    'average CPU time',
    'used memory',
    'requested processors',
    'requested time',
    'requested memory',
    'status',
    'user',
    'group',
    'executable',
    'queue',
    'partition',
    'preceding job',
    'think time',
)
_SUBMIT, _WAIT, _RUN, _ALLOCATED, _REQUESTED, _LIMIT, _STATUS = 1, 2, 3, 4, 7, 8, 10
_PARTS = (2, 3, 4)  # status of parts of a job that was checkpointed; the job has a line of its own
_NEEDED = _ALLOCATED + 1  # a log may leave out the columns that follow
# A job many times larger than the header's machine was rather counted in other units.
_MOST_GROWTH = 2
STANDARD = 'the columns must be the 18 of the Standard Workload Format, in its order'

_HEADER = re.compile(r';\s*(\w+)\s*:\s*(.*?)\s*$')


def read_swf(path: str | Path, machine_nodes: int | None = None) -> JobTable:
    """Read a job log in Standard Workload Format, plain or gzipped. Header comments give the
    machine's size: ``MaxNodes``, and ``MaxProcs`` if jobs are counted in processors (jobs get whole
    nodes). Jobs without a known wait or run time are left out; those cancelled before they ran wait
    until then. Public logs are not tidy: accepted, with one warning, are jobs out of order, lines
    that end after the first five columns, jobs on no known number of processors and lines about
    parts of a job (left out), and jobs of up to twice ``MaxNodes`` (the machine then has as many
    nodes). ``machine_nodes``: in place of ``MaxNodes``. Raises BadInput, with file and line, for
    fewer columns, another order, or impossible numbers.
    """
    lines = read_lines(path, 'a job log in Standard Workload Format')
    header = {m[1]: m[2] for line in lines if line.startswith(';') and (m := _HEADER.match(line))}
    said = [(n, line) for n, line in enumerate(lines, 1) if line.strip() and line[0] != ';']
    rows = []
    for number, line in said:
        with at_line(path, number):
            rows.append((number, _numbers(line)))
    if not rows:
        raise BadInput(f'{path} has no jobs; give a job log in Standard Workload Format.')
    whole = {row[0] for _, row in rows if row[_STATUS] not in _PARTS}
    rows = [each for each in rows if each[1][_STATUS] not in _PARTS or each[1][0] not in whole]
    parts = len(said) - len(rows)
    lost = sum(row[_RUN] > 0 and not _processors(row) for _, row in rows)
    nodes, per_node = _size(path, header, machine_nodes)
    jobs = [job for number, row in rows if (job := _job(number, row, per_node)) is not None]
    back = sum(later[_SUBMIT] < row[_SUBMIT] for (_, row), (_, later) in pairwise(rows))
    short = sum(len(line.split()) < len(COLUMNS) for _, line in said)
    largest = max((job.nodes for job in jobs if job.end > job.start), default=0)
    notes = [
        f'{parts} lines are parts of jobs (left out)' if parts else '',
        f'{lost} jobs ran on no known number of processors (left out)' if lost else '',
        f'{back} lines were submitted before the line above (sorted)' if back else '',
        f'{short} lines have fewer than {len(COLUMNS)} columns (the others are unknown)'
        * (short > 0),
    ]
    if machine_nodes is None and nodes < largest <= _MOST_GROWTH * nodes:
        larger = sum(job.nodes > nodes for job in jobs)
        notes.append(
            f'{larger} jobs have more than the {nodes} nodes of the header (the machine has '
            f'{largest}, then)'
        )
        nodes = largest
    if any(notes):
        logger.warning('%s: %s.', path, '; '.join(filter(None, notes)))
    return job_table(path, jobs, nodes)


def _numbers(line: str) -> list[float]:
    """The columns of a line; ValueError if a needed one holds something else."""
    fields = line.split()
    if not _NEEDED <= len(fields) <= len(COLUMNS):
        raise ValueError(f'{len(fields)} columns; {STANDARD}')
    row: list[float] = []
    for at, text in enumerate(fields):
        with suppress(ValueError):
            row.append(float(text))
        if len(row) <= at or not math.isfinite(row[at]):
            raise ValueError(f'{_column(at)} is {text!r}; it must be a number')
    row += [-1.0] * (len(COLUMNS) - len(fields))  # the standard's mark of what is unknown
    for at in (_WAIT, _RUN, _LIMIT):
        if row[at] > LONGEST_S:
            raise ValueError(f'{_column(at)} is {row[at]:.0f} s, more than ten years; {STANDARD}')
    if row[_STATUS] not in (-1, 0, 1, 2, 3, 4, 5):
        raise ValueError(f'{_column(_STATUS)} is {row[_STATUS]:g}, not one of -1 to 5; {STANDARD}')
    for at in (_ALLOCATED, _REQUESTED):
        if row[at] != math.floor(row[at]):
            raise ValueError(f'{_column(at)} is {row[at]:g}, not a whole number; {STANDARD}')
    return row


def _column(at: int) -> str:
    return f'column {at + 1} ({COLUMNS[at]})'


def _size(path: str | Path, header: dict[str, str], machine_nodes: int | None) -> tuple[int, float]:
    found = {}
    for name in ('MaxNodes', 'MaxProcs'):
        count = re.match(r'\d[\d,]*', header.get(name, ''))
        found[name] = int(count[0].replace(',', '')) if count else 0
    nodes, processors = found['MaxNodes'], found['MaxProcs'] or found['MaxNodes']
    if not nodes and machine_nodes is None:
        raise BadInput(
            f'{path} has no header comment "; MaxNodes: …"; say how many nodes the machine has.'
        )
    per_node = processors / nodes if nodes else max(processors / (machine_nodes or 1), 1.0)
    return machine_nodes or nodes, per_node


def _processors(row: list[float]) -> float:
    return max(row[_ALLOCATED] if row[_ALLOCATED] > 0 else row[_REQUESTED], 0.0)


def _job(number: int, row: list[float], per_node: float) -> Job | None:
    processors = _processors(row)
    if row[_WAIT] < 0 or row[_SUBMIT] < 0 or not processors:
        return None
    start = row[_SUBMIT] + row[_WAIT]
    nodes, end = math.ceil(processors / per_node), start + max(row[_RUN], 0.0)
    limit = row[_LIMIT] if row[_LIMIT] > 0 else math.inf
    return Job(number, row[_SUBMIT], start, end, nodes, limit)
