"""The job table, which every kind of job log is read into."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import read_zipped
from parsl_freetrain.replay.trace import Floats, Ints
from parsl_freetrain.sites.batch.records import NotUnderstood

logger = logging.getLogger(__name__)

LONGEST_S = 10 * 366 * 86_400.0  # a longer time in a log means that the column holds something else


@dataclass(frozen=True, slots=True)
class Job:
    line: int  # its number in the file
    submit: float
    start: float  # equal to the end: cancelled before it ran
    end: float  # infinite: still running when the log ended
    nodes: int  # whole ones
    requested_s: float  # infinite: none, or unknown
    names: tuple[str, ...] = ()  # of its nodes; empty: the log has none


@dataclass(frozen=True, eq=False)
class JobTable:
    """One machine's jobs as columns by submission, in seconds from it; ``placed``: node indices."""

    path: str
    machine: tuple[str, ...]
    line: Ints
    submit: Floats
    start: Floats
    end: Floats
    nodes: Ints
    requested: Floats
    placed: tuple[Ints | None, ...]

    def __len__(self) -> int:
        return len(self.submit)

    @property
    def window(self) -> tuple[float, float]:
        """From the first to the last start, in seconds: all that the log shows."""
        ran = self.start[self.end > self.start]
        return float(ran.min()), float(ran.max())


def job_table(path: str | Path, jobs: Sequence[Job], machine_nodes: int | None) -> JobTable:
    """Check and sort a log's jobs; nodes of the machine: as named. BadInput if impossible."""
    kept = [job for job in jobs if job.nodes > 0 or job.end > job.start]
    if odd := len(jobs) - len(kept):
        logger.warning('%s: %d jobs that never ran have no nodes; left out.', path, odd)
    jobs = kept
    for job in jobs:
        with at_line(path, job.line):
            _check(job)
    ran = [job for job in jobs if job.end > job.start]
    if len({job.start for job in ran}) < 2:
        raise BadInput(
            f'{path} has {len(ran)} jobs that ran; a trace needs at least two that '
            'started at different times.'
        )
    machine = _machine(path, jobs, ran, machine_nodes)
    for job in ran:
        if job.nodes > len(machine):
            raise BadInput(
                f'{path}, line {job.line}: the job has {job.nodes} nodes; the machine '
                f'has {len(machine)}.'
            )
    ordered = sorted(jobs, key=lambda job: (job.submit, job.line))
    place = {name: i for i, name in enumerate(machine)}
    first = ordered[0].submit

    def column(name: str) -> Floats:
        return np.array([getattr(job, name) for job in ordered], dtype=np.float64)

    index = [sorted({place[n] for n in job.names}) if job.names else None for job in ordered]
    nodes = tuple(None if i is None else np.array(i, dtype=np.int64) for i in index)
    times = column('submit') - first, column('start') - first, column('end') - first
    lines, counts = column('line').astype(np.int64), column('nodes').astype(np.int64)
    return JobTable(str(path), machine, lines, *times, counts, column('requested_s'), nodes)


def _check(job: Job) -> None:
    if job.nodes < 1:
        raise ValueError(f'the job has {job.nodes} nodes; it must have at least 1')
    if not job.submit <= job.start <= job.end:
        raise ValueError(
            f'the job was submitted at {job.submit:.0f}, started at {job.start:.0f} and '
            f'ended at {job.end:.0f}; these must follow each other'
        )
    if not job.requested_s > 0:
        raise ValueError(f'the time limit is {job.requested_s:g} s; it must be above 0')


def _machine(
    path: str | Path, jobs: Sequence[Job], ran: Sequence[Job], machine_nodes: int | None
) -> tuple[str, ...]:
    named = sorted({name for job in jobs for name in job.names})
    if machine_nodes is None:
        for job in ran:
            if not job.names:
                raise BadInput(
                    f'{path}, line {job.line}: the log names no nodes for this job; say '
                    'how many nodes the machine has.'
                )
        return tuple(named)
    if len(named) > machine_nodes:
        raise BadInput(f'{path} names {len(named)} nodes; the machine should have {machine_nodes}.')
    # The machine also has nodes that no job ran on. Their names sort after the known ones.
    width = len(str(machine_nodes))
    made_up = (
        f'{"~" if named else ""}node{i:0{width}d}' for i in range(machine_nodes - len(named))
    )
    return (*named, *made_up)


def read_lines(path: str | Path, what: str) -> list[str]:
    """The lines of a text file, plain or gzipped; errors say that it should be ``what``."""
    return read_zipped(path, what).decode('utf-8-sig', errors='replace').splitlines()


@contextmanager
def at_line(path: str | Path, number: int) -> Iterator[None]:
    """Around what is read from a line: BadInput names file and line, and says what is wrong."""
    try:
        yield
    except (NotUnderstood, ValueError) as error:
        raise BadInput(f'{path}, line {number}: {error}.') from None
