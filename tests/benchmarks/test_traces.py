"""How long traces take to read, against their size; run by ``make bench``. Nothing is asserted."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from parsl_freetrain.replay.job_table_holes import holes
from parsl_freetrain.replay.read import read_trace, synthetic
from parsl_freetrain.replay.swf import read_swf
from parsl_freetrain.replay.trace import Trace

DATA = Path(__file__).resolve().parents[3] / 'shared/data'
SUMMIT = DATA / 'idle/summit-2021-02-week1.csv.gz'
THETA = DATA / 'theta-2022.swf.gz'


def measured(what: str, make: Callable[[], Trace]) -> Trace:
    wall, cpu = time.perf_counter(), time.process_time()
    trace = make()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    changes, turning = trace.changes(), time.process_time()
    trace.changes(known_ends=True)
    print(
        f'{what}: {wall:.2f} s ({cpu:.2f} s of one core) for {len(trace):,} intervals; '
        f'{time.process_time() - turning:.2f} s for the changes, {len(changes):,} of them',
        flush=True,
    )
    return trace


def test_synthetic_weeks() -> None:
    for nodes in (500, 1000, 4734):
        measured(f'a synthetic week of {nodes} nodes', lambda nodes=nodes: synthetic(1, nodes))  # type: ignore[misc]


@pytest.mark.skipif(not SUMMIT.exists(), reason='the public Summit trace is not here')
def test_a_week_of_summit() -> None:
    measured('a week of Summit', lambda: read_trace(SUMMIT))


@pytest.mark.skipif(not THETA.exists(), reason='the public log of Theta is not here')
def test_a_year_of_theta() -> None:
    jobs = read_swf(THETA)
    columns = ('line', 'submit', 'start', 'end', 'nodes', 'requested', 'placed')
    for count in (len(jobs) // 4, len(jobs) // 2, len(jobs)):
        part = replace(jobs, **{name: getattr(jobs, name)[:count] for name in columns})
        measured(f'{count} jobs of Theta', lambda part=part: holes(part))  # type: ignore[misc]
