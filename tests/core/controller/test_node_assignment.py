"""Which nodes a fragment gets, once its count is known; habits of nodes."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st
from msgspec.structs import replace

from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.node_assignment import Want, assign, first_end, foresee
from parsl_freetrain.core.controller.node_habits import AGES_S, NodeHabits, learn
from parsl_freetrain.core.controller.node_pool import Group, Pool, PoolNode
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import NodesJoined, StartFragment, TrainerSubmitted
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from tests.support.properties import holds_for

Ends = dict[str, float | None]


def pool_of(**blocks: Ends) -> Pool:
    pool = Pool()
    for block, nodes in blocks.items():
        for name, until_s in nodes.items():
            pool.join(PoolNode(name, block, until_s))
    return pool


def everywhere(pool: Pool) -> dict[str, list[Group]]:
    return {'': list(pool.groups.values())}


def pick(pool: Pool, count: int, *former: str) -> tuple[str, ...] | None:
    return assign([Want('t', {'': count}, former)], everywhere(pool), pool).get('t')


def test_the_smallest_block_that_suffices() -> None:
    def pool() -> Pool:
        return pool_of(big={'b1': 9, 'b2': 9, 'b3': 9}, two={'t1': 9, 't2': 9}, one={'o1': 9})

    assert pick(pool(), 2) == ('t1', 't2')
    assert pick(pool(), 1) == ('o1',)
    assert pick(pool(), 3) == ('b1', 'b2', 'b3')


def test_what_lasts_longest_comes_first_and_an_unknown_end_lasts() -> None:
    assert pick(pool_of(b={'soon': 10, 'open': None, 'late': 99}), 2) == ('open', 'late')


def test_over_blocks_the_largest_first_so_that_they_are_few() -> None:
    pool = pool_of(
        a={'a1': None}, b={'b1': None, 'b2': None, 'b3': None}, c={'c1': None, 'c2': None}
    )
    assert pick(pool, 4) == ('b1', 'b2', 'b3', 'c1')


def test_who_shrinks_gives_back_what_ends_first_and_who_grows_keeps_all() -> None:
    ends: Ends = {'x': 10, 'y': None, 'z': 99}
    assert pick(pool_of(b=ends), 2, 'x', 'y', 'z') == ('y', 'z')
    assert set(pick(pool_of(b=ends, c={'c1': None, 'c2': None}), 4, 'x', 'z') or ()) > {'x', 'z'}


def test_nobody_gets_the_former_nodes_of_one_who_waits() -> None:
    pool = pool_of(b={'n1': None, 'n2': None, 'n3': None})
    pool.hold(['n3'], 'holds on')
    wants = [Want('waits', {'': 3}, ('n1',)), Want('new', {'': 1})]
    assert assign(wants, everywhere(pool), pool) == {'new': ('n2',)}
    assert pick(pool, 1) == ('n1',)


def test_nodes_come_from_the_place_that_was_decided() -> None:
    pool = pool_of(b={'b1': None, 'b2': None}, c={'c1': 50})
    places = {'lasting': [pool.groups['b', math.inf, '']], 'until 50': [pool.groups['c', 50, '']]}
    chosen = assign([Want('t', {'lasting': 1, 'until 50': 1}, ('b2',))], places, pool)
    assert chosen == {'t': ('b2', 'c1')}
    assert first_end(chosen['t'], pool) == 50
    assert first_end(('b2',), pool) is None


@holds_for(
    st.lists(st.tuples(st.sampled_from('abcd'), st.none() | st.integers(1, 100)), max_size=14),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=5),
    st.randoms(use_true_random=False),
    tries=120,
)
def test_nodes_are_given_once_keepers_keep_and_nobody_both_gains_and_loses(
    ends: list[tuple[str, int | None]], changes: list[tuple[int, int]], random: Random
) -> None:
    nodes = [PoolNode(f'n{i:02d}', block, until_s) for i, (block, until_s) in enumerate(ends)]
    order = random.sample(range(len(nodes)), len(nodes))
    wants, used = [], 0
    for i, (had, then) in enumerate(
        changes
    ):  # each had some nodes of its own, and is to have others
        had_names = tuple(nodes[k].name for k in order[used : used + had])
        wants.append(Want(f't{i}', {'': then}, had_names))
        used += had
    chosen = []
    for shuffled in (nodes, random.sample(nodes, len(nodes))):
        pool = Pool()
        for node in shuffled:
            pool.join(node)
        chosen.append(assign(wants, everywhere(pool), pool))
        given = [name for names in chosen[-1].values() for name in names]
        free = [name for group in pool.groups.values() for name in group.free]
        assert sorted(given + free) == sorted(node.name for node in nodes)
    assert chosen[0] == chosen[1]
    for want in wants:
        got = chosen[0].get(want.trainer)
        if got is None:
            continue
        assert len(set(got)) == len(got) == want.counts['']
        assert set(got) >= set(want.former) or set(got) <= set(want.former)
    if sum(want.counts[''] for want in wants) <= len(nodes):
        assert len(chosen[0]) == len(wants)


FLAT = (0.001,) * len(AGES_S)


def test_the_hazard_and_the_order_of_a_record_are_learned() -> None:
    rng = np.random.default_rng(0)
    starts, lasts = rng.uniform(1, 9e3, 2000), rng.uniform(60, 120, 2000)
    found = learn(starts, starts + lasts, rng.permutation(2000), 0.0, 1e4)
    assert found.position == pytest.approx(0.5, abs=0.05)
    assert found.hazard[1] == pytest.approx(1 / 30, rel=0.2)
    assert found.hazard[0] < 1e-3
    at = np.sort(rng.uniform(0, 1e5, 400))
    low = learn(np.zeros(400), at, np.arange(400), 0.0, 1e6)
    assert low.position < 0.01
    high = learn(np.zeros(400), at[::-1].copy(), np.arange(400), 0.0, 1e6)
    assert high.position > 0.99
    assert low.together == 1.0
    assert learn(np.zeros(9), np.full(9, 5.0), np.arange(9), 0.0, 9.0).together == 9.0
    with pytest.raises(BadInput, match='No idle node leaves'):
        learn(np.zeros(2), np.array([9.0, 9.0]), np.arange(2), 0.0, 9.0)


def test_habits_that_cannot_be_are_refused() -> None:
    for hazard, position in (((1.0,), 0.5), (FLAT, 2.0), ((-1.0, *FLAT[1:]), 0)):
        with pytest.raises(BadInput, match='NodeHabits'):
            NodeHabits(hazard=hazard, position=float(position))
        with pytest.raises(BadInput, match='together is 0.5'):
            NodeHabits(hazard=FLAT, together=0.5)


def test_a_fragment_is_told_how_often_to_expect_an_interruption() -> None:
    young, old = (PoolNode(name, 'b', None, since_s=s) for name, s in (('y', 9e4), ('o', 0)))
    falling = NodeHabits(hazard=(0.004, *[0.002] * (len(AGES_S) - 1)))
    assert falling.interruptions_per_s([young], 9e4) == pytest.approx(0.004)
    # One at a time: each counts. Where all leave together, two are hit hardly more often than one.
    assert falling.interruptions_per_s([young, old], 9e4) == pytest.approx(0.006)
    together = replace(falling, together=100.0)
    assert together.interruptions_per_s([young, old], 9e4) == pytest.approx(0.003 * 1.01)
    for habits, expected in ((None, None), (falling, 0.008)):
        made = Controller(DpAllocator(), ControllerSettings(habits=habits))
        curve = ScalingCurve((1, 2), (1.0, 2.0))
        submitted = TrainerSubmitted(5.0, Trainer('a', 1, 4, curve=curve))
        reply = made.handle_all((NodesJoined(5.0, 'b', ('n1', 'n2')), submitted))
        [start] = [action for action in reply.actions if isinstance(action, StartFragment)]
        assert start.interruptions_per_s == (expected and pytest.approx(expected))


def pool() -> Pool:
    """Node a joined last; managers have other names than hosts."""
    made = Pool()
    for i, host in enumerate('dcba'):
        made.join(PoolNode(f'm{i}', 'b', None, '', host, 100.0 * i))
    return made


def test_nodes_that_are_taken_last_come_first_and_else_those_of_the_lowest_hazard() -> None:
    nodes = pool().nodes.values()
    first_taken = NodeHabits(hazard=FLAT, position=0.1)
    assert first_taken.order(nodes, 350.0) == ['m0', 'm1', 'm2', 'm3']
    assert NodeHabits(hazard=FLAT, position=0.9).order(nodes, 350.0) == ['m3', 'm2', 'm1', 'm0']
    falling = tuple(0.01 / (i + 1) for i in range(len(AGES_S)))
    assert NodeHabits(hazard=falling).order(nodes, 350.0) == ['m0', 'm1', 'm2', 'm3']
    assert NodeHabits(hazard=falling[::-1]).order(nodes, 350.0) == ['m3', 'm2', 'm1', 'm0']


def test_the_largest_trainer_gets_the_nodes_that_stay_whoever_had_them() -> None:
    habits, nodes = NodeHabits(hazard=FLAT, position=0.1), pool()
    nodes.hold(['m0'], 'small')
    small, large = Want('small', {'': 1}, ('m0',)), Want('large', {'': 2})
    places = {'': list(nodes.groups.values())}

    def order(some: object) -> list[str]:
        return habits.order(some, 400.0)  # type: ignore[arg-type]

    expected = {'large': ('m0', 'm1'), 'small': ('m2',)}
    assert foresee([small, large], places, nodes, order) == expected
    nodes.release(['m0'], 'small')
    assert assign([small, large], places, nodes, order) == expected
    assert assign([Want('other', {'': 2})], places, nodes, order) == {}
    assert assign([Want('other', {'': 1})], places, nodes, order) == {'other': ('m3',)}
