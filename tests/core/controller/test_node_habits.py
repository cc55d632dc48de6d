"""Habits of nodes: what a record teaches, and which nodes trainers get."""

import numpy as np
import pytest
from msgspec.structs import replace

from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.node_assignment import Want, assign, foresee
from parsl_freetrain.core.controller.node_habits import AGES_S, NodeHabits, learn
from parsl_freetrain.core.controller.node_pool import Pool, PoolNode
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import NodesJoined, StartFragment, TrainerSubmitted
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

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
    assert (low.together, learn(np.zeros(9), np.full(9, 5.0), np.arange(9), 0.0, 9.0).together) == (
        1.0,
        9.0,
    )
    with pytest.raises(BadInput, match='No idle node leaves'):
        learn(np.zeros(2), np.array([9.0, 9.0]), np.arange(2), 0.0, 9.0)


def test_habits_that_cannot_be_are_refused() -> None:
    for hazard, position in (((1.0,), 0.5), (FLAT, 2.0), ((-1.0, *FLAT[1:]), 0)):
        with pytest.raises(BadInput, match='NodeHabits'):
            NodeHabits(hazard=hazard, position=float(position))
        with pytest.raises(BadInput, match='together is 0.5'):
            NodeHabits(hazard=FLAT, together=0.5)


def test_a_fragment_is_told_how_often_to_expect_an_interruption() -> None:
    young, old = (
        PoolNode(name, 'b', None, since_s=since) for name, since in (('y', 9e4), ('o', 0))
    )
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
