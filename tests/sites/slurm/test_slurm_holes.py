"""From answers to holes: pure."""

import math
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.core.model.types import Hole
from parsl_freetrain.sites.batch.node_windows import OnTheWay, Wanted, freed, holes, windows
from parsl_freetrain.sites.batch.records import (
    BatchJob,
    JobState,
    NodeReservation,
    Nodes,
    Partition,
)
from parsl_freetrain.sites.slurm import answers_text

RECORDED = Path(__file__).with_name('recorded')
NOW = 1000.0
BATCH = Partition('batch')
ANY = Wanted('batch')
FAST_SLOW = ('fast', 'slow', '')


def idle(
    *names: str,
    state: str = 'idle',
    marks: str = '',
    features: tuple[str, ...] = (),
    gpus: int = 0,
    partition: str = 'batch',
) -> Nodes:
    return Nodes(partition, names, state, marks, features, gpus)


def planned(start_s: float, *names: str, job_id: str = '7', partition: str = 'batch') -> BatchJob:
    return BatchJob(
        job_id, JobState.PENDING, partition, len(names) or 1, start_s, start_s + 60, names
    )


def until(
    nodes: list[Nodes],
    jobs: list[BatchJob] | None = None,
    reservations: list[NodeReservation] | None = None,
    wanted: Wanted = ANY,
    ours: frozenset[str] = frozenset(),
) -> dict[str, float]:
    return windows(nodes, jobs or [], reservations or [], wanted, ours, NOW)


def test_recorded_answers_give_the_holes_that_were_there() -> None:
    """node07 is planned for a wide job, node06 broken, node08 in a maintenance that comes later."""
    partitions = answers_text.parse_partitions((RECORDED / 'partition-22.05.txt').read_text())
    now = 1795247731.0
    nodes, jobs, reservations = (
        (RECORDED / f'{name}-22.05.txt').read_text() for name in ('sinfo', 'squeue', 'reservation')
    )
    seen = answers_text.parse_nodes(nodes), answers_text.parse_jobs(jobs)
    free = windows(*seen, answers_text.parse_reservations(reservations), ANY, frozenset(), now)
    found = holes(free, [], partitions['batch'], now, 10.0, 60.0)
    ends = (1795249490.0, 'node08'), (1795248170.0, 'node07')
    assert found == tuple(Hole(1, end - 10, 'batch', (name,)) for end, name in ends)


def test_the_first_of_plans_and_reservations_ends_a_window() -> None:
    found = until(
        [idle('a', 'b'), idle('c', state='planned')],
        [planned(1500, 'a'), planned(1300, 'a', 'c'), planned(2000, 'c')],
        [NodeReservation('m', 1200, 5000, ('b',)), NodeReservation('over', 0, 900, ('a',))],
    )
    assert found == {'a': 1300, 'b': 1200, 'c': 1300}


def test_nodes_that_are_needed_now_are_no_hole() -> None:
    assert until(
        [idle('a', 'b', 'c')], [planned(NOW, 'a')], [NodeReservation('on', 500, 5000, ('b',))]
    ) == {'c': math.inf}


def test_an_idle_node_is_no_hole_while_a_job_of_others_has_it_by_the_older_answer() -> None:
    ended = replace(planned(NOW, 'a'), state=JobState.RUNNING, planned=(), names=('a',))
    assert until([idle('a', 'b')], [ended]) == {'b': math.inf}
    assert until([idle('a', 'b')], [ended], ours=frozenset({'7'})) == {'b': math.inf}
    unknown = replace(ended, state=JobState.UNKNOWN)
    assert until([idle('a', 'b')], [unknown]) == {'b': math.inf}
    assert freed(frozenset('ab'), [unknown]) == {'b'}
    assert freed(frozenset('ab'), [replace(unknown, names=())]) == frozenset()


def test_only_nodes_that_fit_count() -> None:
    groups = [idle('a', features=('x', 'y'), gpus=4), idle('b', features=('x',), gpus=4)]
    groups += [idle('c', features=('z',), gpus=4), idle('d', features=('x', 'y'))]
    groups += [idle('e', marks='*'), idle('f', state='mixed')]
    groups += [idle('g', partition='other'), idle('h', marks='-')]
    assert set(until(groups)) == {'a', 'b', 'c', 'd', 'h'}
    assert set(
        until(groups, wanted=Wanted('batch', (frozenset({'x', 'y'}), frozenset({'z'})), 1))
    ) == {'a', 'c'}


def test_nodes_that_are_all_down_or_asleep_are_named_as_the_reason() -> None:
    """Slurm would wake those of a cloud for a job, and no block is submitted for them."""
    asleep = idle('a', marks='~'), idle('b', state='drained'), idle('c', partition='other')
    assert ANY.lacking(asleep) == "no node of the queue 'batch' is up: drained, idle~"
    assert ANY.lacking([*asleep, idle('d', state='allocated')]) == ''


def test_a_plan_without_nodes_bounds_its_whole_partition() -> None:
    groups = [idle('a', 'b'), idle('a', partition='debug')]
    assert until(groups, [planned(1400, partition='debug')]) == {'a': 1400, 'b': math.inf}
    assert until(groups, [planned(1400, partition='debug,batch')]) == {'a': 1400, 'b': 1400}


def test_our_own_waiting_blocks_stand_in_nobodys_way() -> None:
    assert until([idle('a')], [planned(1400, 'a', job_id='5')], ours=frozenset({'5'})) == {
        'a': math.inf
    }


def test_holes_are_grouped_by_their_end_and_end_a_margin_earlier() -> None:
    found = holes(
        {'d': math.inf, 'a': 1500, 'c': 1300, 'b': 1500, 'e': 1079}, [], BATCH, NOW, 20.0, 60.0
    )
    first = Hole(1, None, 'batch', ('d',)), Hole(2, 1480, 'batch', ('a', 'b'))
    assert found == (*first, Hole(1, 1280, 'batch', ('c',)))


def test_a_partition_bounds_holes() -> None:
    five = dict.fromkeys('abcde', 2000.0)
    for least, parts in ((0, [2, 2, 1]), (2, [2, 2])):
        bounds = Partition('p', most_nodes=2, least_nodes=least)
        assert [hole.nodes for hole in holes(five, [], bounds, NOW, 0, 60)] == parts
    assert holes(five, [], Partition('p', up=False), NOW, 0, 60) == ()


def test_blocks_on_their_way_take_the_shortest_windows_that_fit_them() -> None:
    free = {'a': 1500.0, 'b': 1500.0, 'c': 3000.0, 'd': math.inf}
    apart = (None, 'd'), (3000, 'c'), (1500, 'a')
    expected = tuple(Hole(1, until_s, 'batch', (name,)) for until_s, name in apart)
    assert holes(free, [OnTheWay(1, 1400)], BATCH, NOW, 0, 60) == expected
    found = [h.names for h in holes(free, [OnTheWay(1, 2500)], BATCH, NOW, 0, 60)]
    assert found == [('d',), ('a', 'b')]
    assert holes(free, [OnTheWay(9, 1400)], BATCH, NOW, 0, 60) == ()
    [short] = holes(free, [OnTheWay(9, 2500, least_end_s=1501.0)], BATCH, NOW, 0, 60)
    assert short.names == ('a', 'b'), 'the scheduler cannot start it there'


def test_holes_are_of_one_class_and_blocks_on_their_way_take_only_from_theirs() -> None:
    fast, slow, none = (
        replace(idle(n), node_class=c) for n, c in zip('abc', FAST_SLOW, strict=True)
    )
    wanted = Wanted('batch', classes=('fast', 'slow'))
    free = until([fast, slow, none], wanted=wanted)
    classes = {'a': 'fast', 'b': 'slow'}
    found = holes(free, [], BATCH, NOW, 0, 60, classes)
    assert {(h.names, h.node_class) for h in found} == {(('a',), 'fast'), (('b',), 'slow')}
    [left] = holes(free, [OnTheWay(9, 1400, 'slow')], BATCH, NOW, 0, 60, classes)
    assert left.node_class == 'fast'


@given(
    st.dictionaries(
        st.text('abcdef', min_size=1, max_size=3),
        st.one_of(st.just(math.inf), st.floats(900, 5000)),
        max_size=20,
    ),
    st.lists(st.builds(OnTheWay, st.integers(1, 4), st.floats(1000, 5000)), max_size=5),
    st.integers(1, 5),
)
def test_no_node_is_offered_twice(
    free: dict[str, float], blocks: list[OnTheWay], most: int
) -> None:
    found = holes(free, blocks, Partition('batch', most_nodes=most), NOW, 15.0, 60.0)
    names = [name for hole in found for name in hole.names]
    assert len(names) == len(set(names)) <= max(0, len(free) - sum(block.nodes for block in blocks))
    for hole in found:
        assert hole.nodes == len(hole.names) <= most
        assert all(
            math.inf if hole.until_s is None else hole.until_s <= free[name] - 15.0
            for name in hole.names
        )
        assert hole.until_s is None or hole.until_s - NOW >= 60
