"""Holes from job logs: as observed, and as knowable from the reservations of an EASY scheduler."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.job_table import Job, JobTable, job_table
from parsl_freetrain.replay.job_table_holes import holes, reserve
from parsl_freetrain.replay.swf import read_swf
from parsl_freetrain.replay.trace import Trace
from tests.replay.easy import Promise, Simulated, shadow_of, simulate
from tests.support.properties import holds_for

THETA = Path(__file__).resolve().parents[3] / 'shared/data/theta-2022.swf.gz'
MACHINE = 10
INF = math.inf


def table(*jobs: tuple[float, float, float, int, float], machine: int = MACHINE) -> JobTable:
    """Jobs as submit, start, end, nodes, requested."""
    return job_table('log', [Job(i, *job) for i, job in enumerate(jobs, 1)], machine)


def rows(found: Trace) -> list[tuple[float, float, int, float]]:
    """Starts, ends, numbers of nodes and known ends, alike intervals counted together."""
    counts: dict[tuple[float, float, float], int] = {}
    for start, end, known in zip(
        found.starts.tolist(), found.ends.tolist(), found.known_until.tolist(), strict=True
    ):
        counts[start, end, known] = counts.get((start, end, known), 0) + 1
    return sorted((start, end, count, known) for (start, end, known), count in counts.items())


@st.composite
def schedules(draw: st.DrawFn, exact: bool) -> tuple[list[Simulated], list[Promise]]:
    """Jobs that an EASY scheduler has started, and what it had promised meanwhile."""
    jobs = []
    for number in range(draw(st.integers(2, 14))):
        run = draw(st.integers(1, 20))
        requested = run if exact else run + draw(st.integers(0, 15))
        submit, nodes = draw(st.integers(0, 40)), draw(st.integers(1, MACHINE))
        jobs.append(Simulated(number, submit, nodes, requested, run))
    # So that the clock begins at 0, with something that runs.
    jobs.append(Simulated(len(jobs), 0, 1, 5, 5))
    return jobs, simulate(jobs, MACHINE)


def traced(jobs: list[Simulated]) -> Trace | None:
    """The holes of the simulated log; None if there is nothing to replay."""
    listed = [Job(j.number, j.submit, j.start, j.end, j.nodes, j.requested) for j in jobs]
    try:
        return holes(job_table('log', listed, MACHINE))
    except BadInput:
        return None


@holds_for(schedules(exact=False), tries=80)
def test_what_jobs_do_not_use_is_idle(made: tuple[list[Simulated], list[Promise]]) -> None:
    jobs, _ = made
    found = traced(jobs)
    if found is None:
        return
    later = [job for job in jobs if job.start >= found.start_s]
    used = sum(j.nodes * (min(j.end, found.end_s) - min(j.start, found.end_s)) for j in later)
    assert found.idle_node_s() == pytest.approx(MACHINE * (found.end_s - found.start_s) - used)
    for at in np.arange(found.start_s, found.end_s) + 0.5:
        idle = int(((found.starts <= at) & (at < found.ends)).sum())
        assert idle == MACHINE - sum(job.nodes for job in jobs if job.start <= at < job.end)


@holds_for(schedules(exact=False), tries=80)
def test_promises_are_those_of_the_scheduler(made: tuple[list[Simulated], list[Promise]]) -> None:
    """A promise follows the reservation of that moment, and covers the nodes that it leaves."""
    jobs, promised = made
    found = traced(jobs)
    if found is None:
        return
    reserved = {promise.at: promise for promise in promised}
    assert (found.known_until >= found.starts).all()
    for start in sorted(set(found.starts.tolist())):
        new = found.known_until[found.starts == start]
        promise = reserved.get(int(start))
        if promise is None:
            assert (new == INF).all()
            continue
        assert set(new.tolist()) <= {promise.shadow, INF}
        there = (found.starts <= start) & (start < found.ends)
        there &= found.known_until > promise.shadow
        if (new == INF).any():
            assert int(there.sum()) <= promise.extra


@holds_for(schedules(exact=True), tries=100)
def test_only_another_job_than_the_head_breaks_a_promise_where_run_times_are_exact(
    made: tuple[list[Simulated], list[Promise]],
) -> None:
    """The guarantee of EASY: the head alone takes no node before the promised time."""
    jobs, promised = made
    found = traced(jobs)
    if found is None:
        return
    heads = {promise.at: promise.head for promise in promised}
    for start, end, known in zip(
        found.starts.tolist(), found.ends.tolist(), found.known_until.tolist(), strict=True
    ):
        if start < known and end < min(known, found.end_s):
            head = heads.get(int(start))
            assert any(start < job.start <= end and job.number != head for job in jobs)


@holds_for(
    st.integers(1, MACHINE),
    st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 12)), max_size=6),
    tries=100,
)
def test_reservations_agree_with_every_second(needed: int, runs: list[tuple[int, int]]) -> None:
    """Also where running jobs have outlived their requests."""
    running: list[Simulated] = []
    for nodes, left in runs:
        if sum(job.nodes for job in running) + nodes <= MACHINE:
            running.append(Simulated(0, 0, nodes, 20 + left, 99, start=0))
    idle = MACHINE - sum(job.nodes for job in running)
    expected = sorted((float(job.start + job.requested), job.nodes) for job in running)
    found = reserve(needed, idle, expected, now=20)
    if needed > idle:
        shadow = shadow_of(Simulated(1, 0, needed, 1, 1), running, MACHINE, 20)
        assert (found.shadow_s, found.extra) == shadow
    else:
        assert found.shadow_s == 20


def test_a_promise_that_runs_out_is_renewed_when_there_is_one_to_make() -> None:
    # The job that was to be over at 100 goes on until 130, when the head still is not started but
    # someone else submits.
    both = (0, 0, 130, 6, 100), (0, 0, 20, 4, 20)
    found = holes(table(*both, (10, 160, 300, 10, 90), (400, 400, 410, 1, 10)))
    first, then = (20, 100, 4, 100), (100, 160, 4, 100)
    assert rows(found) == [first, then, (130, 160, 6, 130), (300, 400, 10, INF)]
    assert found.idle_node_s(known_ends=True) == 4 * 80 + 10 * 100
    assert found.idle_node_s() == 4 * 140 + 6 * 30 + 10 * 100


def test_a_waiting_job_that_fits_is_passed_over_after_a_while() -> None:
    # Six nodes of ten are idle; a job of four is held back from 10 to 500. For 60 seconds it is
    # taken to be about to start.
    jobs = table(
        (0, 0, 1000, 4, 1000), (0, 0, 20, 6, 20), (10, 500, 600, 4, 100), (700, 700, 710, 1, 10)
    )
    found = rows(holes(jobs, patience_s=60))
    assert found == [(20, 80, 4, 20), (20, 700, 2, INF), (80, 500, 4, INF), (600, 700, 4, INF)]
    first, then = (20, 500, 4, INF), (20, 700, 2, INF)
    assert rows(holes(jobs, patience_s=0)) == [first, then, (600, 700, 4, INF)]


def test_cancelled_job_waits_until_then_and_one_larger_than_machine_reserves_nothing() -> None:
    base = ((0, 0, 100, 6, 100), (0, 0, 20, 4, 20), (200, 200, 210, 1, 10))
    alone = rows(holes(table(*base)))
    assert alone == [(20, 200, 4, INF), (100, 200, 6, INF)]
    shared = rows(holes(table(*base, (5, 50, 50, 8, 10))))
    assert shared == [(20, 100, 2, 100), (20, 200, 2, INF), (100, 200, 8, INF)]
    assert rows(holes(table(*base, (5, INF, INF, 11, 10)))) == alone


def test_jobs_take_the_nodes_that_the_log_names_and_share_them() -> None:
    jobs = [Job(1, 0, 0, 50, 2, 50, ('b', 'c')), Job(2, 0, 10, 30, 1, 30, ('a',))]
    jobs += [Job(3, 0, 40, 90, 1, 50, ('c',)), Job(4, 0, 100, 110, 1, 10, ('a',))]
    found = holes(job_table('log', jobs, None))
    assert found.names == ('a', 'b', 'c')
    starts, ends, nodes, _ = found.intervals()
    listed = list(zip(starts.tolist(), ends.tolist(), nodes.tolist(), strict=True))
    assert listed == [(0, 10, 0), (30, 100, 0), (50, 100, 1), (90, 100, 2)]


def test_a_log_that_uses_more_than_the_machine_has_is_refused() -> None:
    jobs = [(float(i), float(i), i + 100.0, 6, 100.0) for i in range(4)]
    words = 'log, line 2: the job starts on 6 nodes when 4 of 10 are free'
    with pytest.raises(BadInput, match=words):
        holes(table(*jobs))
    # A second too much is the clocks'.
    found = holes(table((0, 0, 101, 6, 100), (0, 100, 200, 6, 100), (0, 300, 310, 1, 1)))
    assert found.idle_node_s() == 4 * 100 + 4 * 99 + 10 * 100


@pytest.mark.skipif(not THETA.exists(), reason='the public log of Theta is not here')
def test_a_part_of_a_year_of_theta(tmp_path: Path) -> None:
    jobs = read_swf(THETA)
    assert (len(jobs), len(jobs.machine)) == (23_911, 4360)
    first = 2000
    columns = ('line', 'submit', 'start', 'end', 'nodes', 'requested', 'placed')
    short = replace(jobs, **{name: getattr(jobs, name)[:first] for name in columns})
    found = holes(short)
    since, until = short.window
    assert (found.start_s, found.end_s) == (since, until)
    lasts = np.minimum(short.end, until) - np.minimum(short.start, until)
    used = float((lasts * short.nodes).sum())
    idle = found.idle_node_s()
    # The log overbooks its machine for some seconds, 163,314 node-seconds in the whole year.
    lacking = idle - (len(jobs.machine) * (until - since) - used)
    assert 0 <= lacking < 163_314
    promised = found.known_until > found.starts
    assert found.idle_node_s(known_ends=True) <= idle
    assert 0.5 < float((found.ends - found.starts)[promised].sum()) / idle < 1
