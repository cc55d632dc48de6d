"""Which waiting jobs would start on nodes of our blocks: pure."""

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from parsl_freetrain.core.controller.nodes_to_give import nodes_to_give
from parsl_freetrain.core.model.types import BlockNodes, NodeDemand
from parsl_freetrain.sites.batch.demand import (
    FORGET_S,
    MOST_JOBS,
    UNWILLING_S,
    Needs,
    StalledJobs,
    could_use,
    needs,
    reserved,
    shortest_behind_s,
)
from parsl_freetrain.sites.batch.queue_play import ENDING_S, SOON_S
from parsl_freetrain.sites.batch.records import BatchJob, JobState, NodeReservation, Nodes

NOW = 1000.0
OURS = frozenset({'mine', 'other'})


def cluster(
    idle: tuple[str, ...] = (), busy: tuple[str, ...] = ('a', 'b', 'c', 'd')
) -> list[Nodes]:
    return [
        Nodes('batch', idle, 'idle'),
        Nodes('batch', tuple(name for name in busy if name not in idle), 'allocated'),
    ]


def running(job: str, *names: str, end_s: float | None = NOW + 500) -> BatchJob:
    return BatchJob(job, JobState.RUNNING, 'batch', len(names), NOW - 100, end_s, (), names)


def waiting(
    job: str, nodes: int, limit_s: float | None = 60.0, partition: str = 'batch', **more: Any
) -> BatchJob:
    return BatchJob(job, JobState.PENDING, partition, nodes, limit_s=limit_s, **more)


def need(nodes: list[Nodes], *jobs: BatchJob, **more: Any) -> Needs:
    return needs(nodes, jobs, more.pop('reservations', ()), OURS, NOW, **more)


def test_a_job_needs_what_idle_nodes_lack() -> None:
    jobs = running('mine', 'a', 'b', 'c'), waiting('7', 2)
    assert need(cluster(('d',)), *jobs) == Needs(
        (NodeDemand('7', 1, frozenset('abc')),), frozenset({'7'}), frozenset({'7'})
    )
    assert need(cluster(('c', 'd')), running('mine', 'a', 'b'), waiting('7', 2)).demands == ()


def test_no_block_lasts_longer_than_the_shortest_job_that_could_pass_another() -> None:
    first, next_, last = (
        waiting(job, 1, limit_s, priority=priority)
        for job, limit_s, priority in (('1', 60.0, 9.0), ('2', 300.0, 5.0), ('3', 120.0, 5.0))
    )
    assert shortest_behind_s([next_, first, last], OURS) == 120.0
    assert shortest_behind_s([first], OURS) == shortest_behind_s([], OURS) == math.inf
    others = waiting('mine', 1, 60.0), waiting('4', 1, 60.0, blocked=True), waiting('5', 1, None)
    assert shortest_behind_s([first, *others], OURS) == math.inf


def test_a_job_that_needs_more_than_we_have_is_no_reason() -> None:
    jobs = running('mine', 'a', 'b'), running('5', 'c', 'd'), waiting('7', 3)
    assert need(cluster(), *jobs) == Needs()


def test_jobs_that_our_nodes_would_not_serve() -> None:
    for job in (
        waiting('7', 1, blocked=True),
        BatchJob('7', JobState.HELD, 'batch', 1),
        BatchJob('7', JobState.PENDING, 'debug', 1),
        waiting('mine', 1),
        waiting('8', 1, name='freetrain.run.block-0.0a1b2c'),
        waiting('7', 1, only=('c',)),
        waiting('7', 2, only=('c',)),
        waiting('7', 1, excluded=('a', 'b')),
        waiting('7', 1, features=(frozenset({'big'}),)),
        waiting('7', 1, gpus=1),
    ):
        assert need(cluster(), running('mine', 'a', 'b'), running('5', 'c', 'd'), job).demands == ()


def block(job: str, *names: str) -> BatchJob:
    """Of some run or other."""
    return replace(running(job, *names), name=f'freetrain.run-{job}.block-0.0a1b2c')


@pytest.mark.parametrize(
    ('wide', 'parts'),
    [(1, (0, 0, 1)), (2, (2, 0, 0)), (3, (0, 3, 0)), (4, (0, 3, 1)), (6, (2, 3, 1)), (7, (0,) * 3)],
)
def test_each_of_several_runs_gives_its_own_part(wide: int, parts: tuple[int, ...]) -> None:
    """As few blocks as possible, and each run finds the same."""
    blocks = block('one', 'a', 'b'), block('two', 'c', 'd', 'e'), block('three', 'f')
    nodes, wait = [Nodes('batch', tuple('abcdefg'), 'allocated')], waiting('7', wide)
    jobs = (*blocks, running('5', 'g'), wait)
    found = [needs(nodes, jobs, (), frozenset({b.job_id}), NOW) for b in blocks]
    assert tuple(sum(d.nodes for d in each.demands) for each in found) == parts
    for each, own, part in zip(found, blocks, parts, strict=True):
        assert all(d.among == set(own.names) for d in each.demands)
        assert each.served == ({'7'} if any(parts) else set()), 'none takes back what it has given'
        others = {b.job_id for b, n in zip(blocks, parts, strict=True) if n and b is not own}
        assert each.asked == others, part


def test_nothing_is_taken_back_that_was_given_for_a_job_that_waits_for_another_run() -> None:
    """Nor for one that starts in a moment."""
    nodes, wait = [Nodes('batch', ('b', 'c'), 'allocated'), Nodes('batch', ('a',), 'idle')], [2, 1]
    for wide, jobs in zip(wait, ([block('two', 'b', 'c')], []), strict=True):
        found = needs(nodes, [*jobs, waiting('7', wide)], (), frozenset(), NOW)
        assert found.served == {'7'} and not found.demands


def test_a_run_that_gives_nothing_counts_as_a_job() -> None:
    jobs = block('one', 'a'), block('two', 'b', 'c'), waiting('7', 3), waiting('8', 1)
    stalled = StalledJobs(120.0)
    nodes = [Nodes('batch', tuple('abc'), 'allocated')]
    for after_s in (0.0, UNWILLING_S, UNWILLING_S + 1):
        assert stalled.unwilling(NOW + after_s) == ({'two'} if after_s > UNWILLING_S else set())
        stalled.note({'7'}, {'7'}, {'7'}, frozenset(), NOW + after_s, {'two'})
    found = needs(nodes, jobs, (), frozenset({'one'}), NOW, unwilling=frozenset({'two'}))
    assert [d.job for d in found.demands] == ['8'], 'and the other job is served at least'


def test_the_scheduler_is_asked_often_only_while_a_job_may_get_our_nodes() -> None:
    for job, could in (
        (waiting('7', 9, 1e6), True),
        (waiting('7', 1, partition='long,batch'), True),
        (waiting('7', 2, only=('d',)), True),
        (waiting('7', 1, only=('d',)), False),
        (waiting('7', 1, excluded=('a', 'b')), False),
        (waiting('7', 1, partition='debug'), False),
        (waiting('7', 1, gpus=1), False),
        (waiting('7', 1, features=(frozenset({'big'}),)), False),
        (waiting('7', 1, blocked=True), False),
        (block('7'), False),
    ):
        for had in (('a', 'b'), ()):
            assert could_use(cluster(), [running('mine', *had), job], OURS) == (could and bool(had))


def shared(*free: int, memory: float = 4000.0, gpus: int = 0) -> tuple[list[Nodes], list[BatchJob]]:
    """Nodes of four CPUs with a job on each that leaves so many free; a and b are ours."""
    names = tuple('cdefg'[: len(free)])
    size: dict[str, Any] = {'cpus': 4, 'memory': 4000.0, 'gpus': gpus}
    nodes = [
        Nodes('batch', ('a', 'b'), 'allocated', **size),
        Nodes('batch', names, 'mixed', **size),
    ]
    jobs = [
        replace(running(name, name), cpus=4 - left, memory=memory / 4, gpus=gpus)
        for name, left in zip(names, free, strict=True)
    ]
    return nodes, [block('mine', 'a', 'b'), *jobs]


def test_partly_used_nodes_serve_a_job_as_far_as_they_go() -> None:
    for job, lacks in (
        (waiting('7', 3, cpus=9), 2),  # --ntasks=9
        (waiting('7', 3, cpus=11), 2),
        (waiting('7', 3, cpus=12), None),
        (waiting('7', 1, cpus=3), 0),
        (waiting('7', 1, cpus=4), 1),
        (waiting('7', 1, cpus=3, step=3), 1),  # --cpus-per-task=3
        (waiting('7', 1, cpus=1, memory=3000.0), 0),
        (waiting('7', 1, cpus=1, memory=3001.0), 1),
        (waiting('7', 3, cpus=3, memory=3500.0), None),
        (waiting('7', 1), 1),  # --exclusive
        (waiting('7', 3), None),
        (waiting('7', 4, cpus=4), 1),
        (waiting('7', 1, cpus=1, tasks=11), 2),
        (waiting('7', 1, cpus=1, tasks=7), 1),
        (waiting('7', 2, cpus=2, least_nodes=1, step=1), 0),
    ):
        nodes, jobs = shared(1, 1, 1)
        found = needs(nodes, [*jobs, job], (), frozenset({'mine'}), NOW)
        assert found.served == (frozenset() if lacks is None else {'7'})
        assert sum(d.nodes for d in found.demands) == (lacks or 0)


def test_a_job_on_several_nodes_has_all_that_it_can_of_the_first_ones() -> None:
    """As Slurm gives them: 7 tasks are 4 and 3; 6 are 3 and 3 only if the job says so."""
    nodes, jobs = shared(0, 0)
    for has, step, wants, lacks in ((7, 1, 5, 1), (7, 1, 6, 2), (6, 1, 2, 0), (6, 3, 2, 1)):
        there = replace(running('5', 'c', 'd'), cpus=has, step=step)
        queue = [jobs[0], there, waiting('7', 1, cpus=wants, step=1 + (wants == 2))]
        found = needs(nodes, queue, *((), frozenset({'mine'}), NOW))
        assert sum(d.nodes for d in found.demands) == lacks, (has, step, wants)


def test_partly_used_nodes_serve_until_a_planned_job_takes_them() -> None:
    nodes, jobs = shared(1, 1, 1)
    first = waiting('8', 5, 600.0, priority=9.0, cpus=20)
    for limit_s, demands in ((400.0, 0), (600.0, 1)):  # theirs end after 500 s
        small = waiting('7', 1, limit_s, cpus=1)
        found = needs(nodes, [*jobs, first, small], (), frozenset({'mine'}), NOW)
        assert found.served == ({'7'} if limit_s < 500 else set()), demands


def test_gpus_and_the_rest_of_a_node_go_together() -> None:
    nodes, jobs = shared(2, gpus=2)
    for gpus in (0, 1):
        job = waiting('7', 1, cpus=1, gpus=gpus)
        found = needs(nodes, [*jobs, job], (), frozenset({'mine'}), NOW)
        assert sum(d.nodes for d in found.demands) == gpus, 'its job has both of them'


@pytest.mark.parametrize('name', ['freetrain.sh', 'freetrain.my.job.sh', 'freetrain.a.b.0a1b2c~'])
def test_a_job_with_a_name_like_ours_is_served(name: str) -> None:
    assert need(cluster(), running('mine', *'abcd'), waiting('7', 1, name=name)).served == {'7'}


def test_the_scheduler_would_not_let_a_long_job_delay_the_one_before_it() -> None:
    """The wide one gets its turn when job 5 ends; what is shorter than that may go first."""
    jobs = running('mine', 'a', 'b'), running('5', 'c', 'd', end_s=NOW + 100), waiting('wide', 4)
    assert need(cluster(), *jobs, waiting('7', 1, 120.0)).demands == ()
    assert [d.job for d in need(cluster(), *jobs, waiting('7', 1, 90.0)).demands] == ['7']
    first = waiting('7', 1, 120.0, priority=5.0)
    assert [d.job for d in need(cluster(), *jobs, first).demands] == ['7']


def test_a_reservation_keeps_jobs_away_that_would_run_into_it() -> None:
    maintenance = [NodeReservation('m', NOW + 100, NOW + 900, ('a', 'b'))]
    jobs = running('mine', 'a', 'b'), running('5', 'c', 'd')
    assert need(cluster(), *jobs, waiting('7', 1, 120.0), reservations=maintenance).demands == ()
    assert need(cluster(), *jobs, waiting('7', 1, 90.0), reservations=maintenance).demands


def test_short_jobs_get_the_nodes_that_are_reserved_later() -> None:
    """Otherwise one of the long jobs, which only c and d serve, would have to wait for it."""
    maintenance = [NodeReservation('m', NOW + 100, NOW + 900, ('a', 'b'))]
    long = [waiting(job, 1, 200.0) for job in ('8', '9')]
    for ours in (('c', 'd', 'a', 'b'), ('a', 'b', 'c', 'd')):
        jobs = running('mine', *ours), waiting('7', 1, 90.0, priority=5.0), *long
        found = need([Nodes('batch', ours, 'allocated')], *jobs, reservations=maintenance)
        assert found.demands == (
            NodeDemand('7', 1, frozenset('abcd'), frozenset('ab')),
            *(NodeDemand(job.job_id, 1, frozenset('cd')) for job in long),
        )


def test_nodes_that_a_planned_job_takes_are_spare_until_then() -> None:
    wide = waiting('wide', 3, 600.0, priority=5.0, planned=('b', 'c', 'd'))
    jobs = running('mine', 'a', 'b'), running('5', 'c', 'd', end_s=NOW + 100), wide
    [demand] = need(cluster(), *jobs, waiting('7', 1, 90.0)).demands
    assert demand == NodeDemand('7', 1, frozenset('ab'), frozenset('b'))


def test_a_reservation_that_is_nearly_over_counts_as_over() -> None:
    """Nodes are free when it ends, not a while after."""
    nodes = [Nodes('batch', ('a', 'b'), 'allocated'), Nodes('batch', ('c', 'd'), 'maint')]
    jobs = running('mine', 'a', 'b'), waiting('7', 3)

    def until(end_s: float) -> list[NodeReservation]:
        return [NodeReservation('m', NOW - 60, end_s, ('c', 'd'))]

    assert need(nodes, *jobs, reservations=until(NOW + SOON_S + 1)).demands == ()
    [demand] = need(nodes, *jobs, reservations=until(NOW + SOON_S)).demands
    assert demand == NodeDemand('7', 1, frozenset('ab'))


def test_a_job_that_a_reservation_keeps_out_holds_nobody_up() -> None:
    maintenance = [NodeReservation('m', NOW + 100, NOW + 900, ('c', 'd'))]
    jobs = running('mine', 'a'), waiting('wide', 4, 600.0), waiting('7', 1, 6000.0)
    nodes = cluster(('b', 'c', 'd'))
    assert need(nodes, *jobs, reservations=maintenance).served == {'7'}
    assert need(nodes, *jobs, running('5', 'c'), reservations=maintenance).served == {'7'}
    assert need(nodes, *jobs, running('5', 'c')).served == frozenset(), 'it is first in the queue'
    named = waiting('named', 1, 600.0, only=('c',))  # with one that is reserved, or another's
    assert need(nodes, jobs[0], named, *jobs[1:], reservations=maintenance).served == {'7'}
    busy = running('5', 'c', end_s=NOW + 9000)
    first = waiting('first', 1, 600.0, only=('c',))
    assert need(nodes, jobs[0], busy, first, *jobs[1:], reservations=maintenance).served == {'7'}


def test_a_job_that_a_reservation_keeps_out_has_its_turn_once_another_one_waits() -> None:
    """Job 'later' may have e only after 'wide', so that job '7' can have it until then."""
    maintenance = [NodeReservation('m', NOW + 50, NOW + 110, ('a', 'b'))]
    nodes = [Nodes('batch', ('a', 'b', 'd', 'e'), 'allocated'), Nodes('batch', ('c',), 'idle')]
    jobs = (
        running('mine', 'a', 'b', 'e'),
        running('5', 'd', end_s=NOW + 350),
        waiting('wide', 5, 180.0),
        waiting('next', 3, 120.0, planned=('a', 'b', 'c')),
        waiting('later', 2, 300.0, planned=('c', 'e')),
        waiting('7', 1, 240.0),
    )
    [demand] = need(nodes, *jobs, reservations=maintenance).demands
    assert demand == NodeDemand('7', 1, frozenset('e'), frozenset('e'))


def test_a_plan_that_was_made_around_a_block_is_not_waited_for() -> None:
    """Job 'next' could have a and b later, and c or e; it is planned on both, since a block has a
    until then. If a is given back, job '7' can have c.
    """
    maintenance = [NodeReservation('m', NOW + 50, NOW + 110, ('a', 'b'))]
    nodes = [Nodes('batch', ('a', 'b', 'd', 'e'), 'allocated'), Nodes('batch', ('c',), 'idle')]
    planned = waiting('next', 3, 120.0, planned=('b', 'c', 'e'))
    jobs = (running('5', 'd', end_s=NOW + 350), planned, waiting('7', 1, 240.0))
    short = running('mine', 'b', 'e', end_s=NOW + 100)
    ends = running('other', 'a', end_s=NOW + 100)
    lasts = running('other', 'a', end_s=NOW + 200)
    assert need(nodes, short, ends, *jobs, reservations=maintenance).demands == ()
    assert need(nodes, short, lasts, *jobs, reservations=maintenance).demands == (
        NodeDemand('7', 1, frozenset('a'), shared=True),
    )


def test_a_job_gets_the_nodes_that_it_names_and_others() -> None:
    jobs = running('mine', 'a', 'b', 'c'), waiting('7', 2, only=('c',))
    named = NodeDemand('7', 1, frozenset('c'))
    assert need(cluster(('d',)), *jobs).demands == (named,)
    either = NodeDemand('7', 1, frozenset('ab'))
    assert need(cluster(), running('5', 'd'), *jobs).demands == (named, either)


def test_only_nodes_with_the_features_that_a_job_wants_serve_it() -> None:
    nodes = [
        Nodes('batch', ('a',), 'allocated', features=('big', 'new'), gpus=2),
        Nodes('batch', ('b',), 'allocated', features=('big',)),
    ]
    mine = running('mine', 'a', 'b')
    for wanted in ({'features': (frozenset({'new'}), frozenset({'huge'}))}, {'gpus': 2}):
        [demand] = need(nodes, mine, waiting('7', 1, **wanted)).demands
        assert demand.among == {'a'}


def test_several_jobs_and_the_tasks_of_an_array_get_nodes_of_their_own() -> None:
    jobs = running('mine', 'a', 'b'), running('other', 'c', 'd')
    found = need(cluster(), *jobs, waiting('7_[0-2]', 1, tasks=3), waiting('8', 2))
    assert found.demands == (NodeDemand('7_[0-2]', 1, frozenset('abcd')),) * 3
    found = need(cluster(), *jobs, waiting('7_[0-1]', 1, tasks=2), waiting('8', 2))
    assert [demand.nodes for demand in found.demands] == [1, 1, 2]


def test_nodes_on_their_way_back_are_waited_for_but_not_for_ever() -> None:
    def ending(since_s: float) -> BatchJob:
        return BatchJob('other', JobState.ENDING, 'batch', 1, NOW - 100, NOW - since_s, (), ('c',))

    jobs = running('mine', 'a', 'b'), running('5', 'd'), waiting('7', 1)
    assert need(cluster(), *jobs, ending(2.0)).demands == ()
    assert need(cluster(), *jobs, ending(ENDING_S + 1)).demands


def test_nodes_that_are_set_aside_while_a_block_has_them_are_given_back_before() -> None:
    course = NodeReservation('course', NOW + 100, NOW + 900, ('a', 'c'))
    held = running('mine', 'a', 'b'), running('5', 'c', 'd')
    demand = NodeDemand('reservation course', 1, frozenset('a'), shared=True)
    assert reserved(held, [course], [], OURS, NOW + 101) == (demand,)
    assert reserved(held, [course], [], OURS, NOW + 100) == (), 'it is not yet time'
    assert reserved(held, [course], [], OURS, NOW + 901) == (), 'it is over'
    in_time = running('mine', 'a', 'b', end_s=NOW + 90)
    assert reserved([in_time], [course], [], OURS, NOW + 101) == ()


def test_drained_nodes_are_given_back() -> None:
    held = running('mine', 'a', 'b'), running('5', 'c', 'd')
    for state in ('draining', 'job-exclusive+offline', 'allocated'):
        nodes = Nodes('batch', ('a', 'c'), state), Nodes('batch', ('b', 'd'), 'allocated')
        found = reserved(held, [], nodes, OURS, NOW)
        drained = NodeDemand('drained a', 1, frozenset('a'), shared=True)
        assert found == (() if state == 'allocated' else (drained,))


def test_broken_nodes_serve_nobody() -> None:
    for broken in (Nodes('batch', ('a',), 'draining'), Nodes('batch', ('a',), 'allocated', '*')):
        assert need([broken], running('mine', 'a'), waiting('7', 1)) == Needs()


def test_a_job_that_could_start_and_does_not_is_ignored_for_a_while() -> None:
    stalled = StalledJobs(120.0)

    def note(served: Collection[str], at: float) -> None:
        stalled.note(served, served, {'7', '8'}, frozenset(), at)

    note({'7'}, NOW)
    assert stalled.ignored(NOW + 120.0) == frozenset()
    late = NOW + 120.0 + 1
    assert stalled.ignored(late) == {'7'}
    note((), late)  # since it is ignored, it is not served
    assert stalled.ignored(late) == {'7'}
    note({'8'}, NOW + FORGET_S)
    assert stalled.ignored(NOW + FORGET_S) == frozenset()
    note({'8'}, NOW + FORGET_S + 1)
    note((), NOW + FORGET_S + 2)  # nodes went to somebody else meanwhile
    note({'8'}, NOW + FORGET_S + 3)
    assert stalled.ignored(NOW + FORGET_S + 120.0 + 2) == frozenset()
    jobs = running('mine', 'a', 'b'), waiting('7', 1)
    assert need(cluster(), *jobs, ignored=frozenset({'7'})) == Needs()


def test_idle_nodes_on_which_a_job_does_not_start_do_not_suit_it() -> None:
    """It may need more memory than they have, which is not told. Then nodes of ours serve it."""
    stalled = StalledJobs(120.0)
    jobs = running('mine', 'a', 'b'), waiting('7', 1)

    def look(idle: tuple[str, ...], at: float) -> Needs:
        found = need(cluster(idle), *jobs, unsuitable=stalled.unsuitable())
        lacking = {demand.job for demand in found.demands}
        stalled.note(found.served, lacking, {'7'}, frozenset(idle), at)
        return found

    for at in (0.0, 30.0, 60.0):
        assert look(('c', 'd') if at else ('d',), NOW + at).demands == ()
    assert look(('c', 'd'), NOW + 61.0) == Needs((), frozenset({'7'}))
    # Node c came later, and has its time.
    assert stalled.unsuitable() == {'7': frozenset('d')}
    assert look(('c', 'd'), NOW + 62.0) == Needs((), frozenset({'7'}))
    assert look(('d',), NOW + 63.0).demands == (NodeDemand('7', 1, frozenset('ab')),)
    # A job that lacks nodes of ours waits for us, and not for the idle ones.
    wide = StalledJobs(120.0)
    for at in (0.0, 61.0, 90.0):
        wide.note({'8'}, {'8'}, {'8'}, frozenset('d'), NOW + at)
    assert wide.unsuitable() == {}


def test_jobs_that_do_not_compete_for_our_nodes_are_not_counted() -> None:
    """Nor do more than a few tasks of one array; other jobs behind them are served."""
    elsewhere = [Nodes('gpu', ('g',), 'allocated'), *cluster()]
    jobs = running('mine', 'a', 'b'), running('5', 'c', 'd')
    of_gpu = [
        BatchJob(f'g{n}', JobState.PENDING, 'gpu', 1, limit_s=60.0, priority=9.0)
        for n in range(MOST_JOBS)
    ]
    array = waiting('9', 4, 600.0, tasks=10 * MOST_JOBS, priority=5.0)
    found = need(elsewhere, *jobs, *of_gpu, array, waiting('7', 1, 60.0))
    assert [demand.job for demand in found.demands] == ['7']
    crowd = [waiting(f'w{n}', 4, 600.0, priority=5.0) for n in range(MOST_JOBS)]
    assert need(cluster(), *jobs, *crowd[1:], waiting('7', 1, 60.0)).demands
    assert need(cluster(), *jobs, *crowd, waiting('7', 1, 60.0)).demands == ()


def test_a_later_job_does_not_keep_the_first_from_its_node() -> None:
    """Job w2 is planned on e because a block has b; w0 may get b, and then both are served."""
    nodes = [Nodes('batch', tuple('abcde'), 'allocated'), Nodes('batch', ('f',), 'idle')]
    jobs = (
        running('mine', 'b', end_s=NOW + 200),
        running('other', 'd', end_s=NOW + 200),
        running('5', 'c', end_s=NOW + 200),
        running('6', 'a', end_s=NOW + 100),
        running('8', 'e', end_s=NOW + 30),
        waiting('w0', 2, 120.0, planned=('e', 'f'), priority=3.0),
        waiting('w1', 4, 600.0, planned=tuple('abcd'), priority=2.0),
        waiting('w2', 1, 600.0, planned=('e',), priority=1.0),
    )
    found = need(nodes, *jobs).demands
    assert [demand.job for demand in found] == ['w0', 'w2', 'w2']
    held = [BlockNodes('mine', ('b',)), BlockNodes('other', ('d',))]
    assert nodes_to_give(found, held, {}, {}) == {'b', 'd'}


def test_two_reservations_of_a_node_need_it_once() -> None:
    both = [NodeReservation(name, NOW + 5, NOW + 900, ('a',)) for name in ('m', 'n')]
    demands = reserved([running('mine', 'a', 'b')], both, [], OURS, NOW + 10)
    assert nodes_to_give(demands, [BlockNodes('mine', ('a', 'b'))], {}, {}) == {'a', 'b'}
