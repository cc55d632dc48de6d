"""Budgets and minimum shares: use, trainers that are stopped, and shares that are kept."""

import math
import re
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.constraints import reachable_sums
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.solver import allocator_named

LINEAR = ScalingCurve.from_points({1: 10.0, 64: 640.0})
STOP_S = 3.0


@dataclass
class Use:
    """One fragment as the outside sees it: nodes, from when to when."""

    trainer: str
    nodes: int
    start: float
    end: float = math.inf
    stops_at: float = math.inf


class World:
    """Obeys the controller; a fragment that is asked to stop takes STOP_S seconds for it."""

    def __init__(self, **settings: object) -> None:
        self.controller = Controller(
            allocator_named('auto', isolated=False),
            ControllerSettings(**settings),  # type: ignore[arg-type]
        )
        self.at = 0.0
        self.uses: list[Use] = []
        self.running: dict[str, tuple[int, Use]] = {}
        self.over: dict[str, ev.EndTrainer] = {}

    def tell(self, *events: ev.Event) -> None:
        for action in self.controller.handle_all(events).actions:
            match action:
                case ev.StartFragment(name, number, nodes):
                    use = Use(name, len(nodes), self.at)
                    self.uses.append(use)
                    self.running[name] = number, use
                case ev.StopFragment(name):
                    self.running[name][1].stops_at = self.at + STOP_S
                case ev.AbandonFragment(name):
                    self.running[name][1].stops_at = self.at
                case ev.EndTrainer(name):
                    self.over[name] = action

    def until(self, at: float, *, watched: bool = True) -> None:
        """Let time pass; ``watched``: the controller hears when a budget is spent."""
        while True:
            spent = self.controller.state.budgets.next_spent() if watched else math.inf
            stops = min((use.stops_at for _, use in self.running.values()), default=math.inf)
            following = min(max(spent, self.at), stops, at)
            if following >= at:
                break
            self.at = following
            if not self.end_stopped():
                self.tell(ev.Tick(self.at))
        self.at = at
        self.end_stopped()
        self.tell(ev.Tick(self.at))

    def end_stopped(self) -> bool:
        due = [name for name, (_, use) in self.running.items() if use.stops_at <= self.at]
        for name in due:
            number, use = self.running.pop(name)
            use.end = self.at
            self.tell(ev.FragmentEnded(self.at, name, number, number * 7, Ending.STOPPED))
        return bool(due)

    def used(self, *names: str) -> float:
        """Node-seconds, counted by brute force."""
        return sum(
            use.nodes * (min(use.end, self.at) - use.start)
            for use in self.uses
            if not names or use.trainer in names
        )


def trainer(name: str, low: int = 1, high: int = 8, **more: object) -> Trainer:
    return Trainer(name, low, high, 10**9, LINEAR, **more)  # type: ignore[arg-type]


def nodes(count: int, block: str = 'b') -> tuple[str, ...]:
    return tuple(f'{block}{i:02d}' for i in range(count))


def test_a_trainer_whose_budget_is_spent_is_stopped_and_says_so() -> None:
    world = World(budgets={'user anna': 400.0})
    world.tell(ev.TrainerSubmitted(0.0, trainer('net', user='anna')))
    world.tell(ev.TrainerSubmitted(0.0, trainer('other', user='bert')))
    world.tell(ev.NodesJoined(0.0, 'b', nodes(8)))
    world.until(1000.0)
    assert 400 <= world.used('net') <= 400 + 8 * STOP_S
    assert world.over['net'].state == 'failed'
    assert 'budget of user anna, 400 node-seconds, is spent' in world.over['net'].why
    assert 'other' not in world.over
    assert world.running['other'][1].nodes == 8  # what the one may not use is for the other
    world.tell(ev.TrainerSubmitted(world.at, trainer('late', user='anna')))
    assert world.over['late'].state == 'failed'  # at once: it would wait for ever


def test_nothing_is_started_on_what_is_left_of_a_budget_if_it_is_too_little() -> None:
    world = World(budgets={'trainer net': 400.0}, used_before={'trainer net': 391.0}, min_hole_s=5)
    world.tell(ev.NodesJoined(0.0, 'b', nodes(4)))
    world.tell(ev.TrainerSubmitted(0.0, trainer('net', low=2)))
    assert world.used() == 0
    assert world.over['net'].state == 'failed'


def test_cancelling_wins_over_a_spent_budget() -> None:
    world = World(budgets={'total': 80.0})
    world.tell(ev.NodesJoined(0.0, 'b', nodes(8)))
    world.tell(ev.TrainerSubmitted(0.0, trainer('net')))
    world.at = 10.0
    world.tell(ev.Tick(10.0))
    assert math.isfinite(world.running['net'][1].stops_at)
    world.tell(ev.TrainerCancelled(10.0, 'net'))
    world.until(20.0)
    assert world.over['net'].state == 'cancelled'


OWNERS = st.sampled_from(['', 'anna', 'bert'])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(['submit', 'join', 'leave', 'cancel', 'wait']),
        st.integers(1, 6),
        st.sampled_from([0.0, 1.0, 2.5, 40.0]),
        OWNERS,
    ),
    max_size=25,
)


@given(
    steps=STEPS,
    total=st.sampled_from([0.0, 50.0, 1000.0, 1e9]),
    annas=st.sampled_from([30.0, 500.0, 1e9]),
)
@example(
    steps=[('submit', 2, 0.0, 'anna'), ('join', 2, 0.0, ''), ('submit', 1, 40.0, '')],
    total=50.0,
    annas=30.0,
)
def test_a_budget_is_exceeded_by_no_more_than_the_stops(
    steps: list[tuple[str, int, float, str]], total: float, annas: float
) -> None:
    budgets = {'total': total, 'user anna': annas, 'group lab': 700.0}
    world = World(budgets=budgets)
    owners: dict[str, str] = {}
    joined = 0
    for what, number, seconds, owner in steps:
        if what == 'submit':
            name = f't{len(owners)}'
            owners[name] = owner
            new = trainer(name, 1, number, user=owner, group='lab' if owner else '')
            world.tell(ev.TrainerSubmitted(world.at, new))
        elif what == 'join':
            names = tuple(f'n{joined + i:03d}' for i in range(number))
            joined += number
            world.tell(ev.NodesJoined(world.at, f'b{joined}', names))
        elif what == 'leave':
            present = sorted(world.controller.state.pool.nodes)[:number]
            world.tell(ev.NodesLeft(world.at, tuple(present)))
            world.end_stopped()
        elif what == 'cancel' and owners:
            world.tell(ev.TrainerCancelled(world.at, sorted(owners)[number % len(owners)]))
        world.until(world.at + seconds)
        members = {
            'total': list(owners),
            'user anna': [n for n, o in owners.items() if o == 'anna'],
            'group lab': [n for n, o in owners.items() if o],
        }
        for key, names_of_key in members.items():
            used = world.used(*names_of_key) if names_of_key else 0.0
            meter = world.controller.state.budgets._meters[key]
            assert meter.used_at(world.at) == pytest.approx(used)
            of_key = [use.nodes for use in world.uses if use.trainer in names_of_key]
            most_nodes = min(sum(of_key), joined)  # that can be in use while it stops
            assert used <= budgets[key] + STOP_S * most_nodes + 1e-3


def test_a_minimum_share_is_kept_whatever_others_are_worth() -> None:
    world = World(min_shares={'group physics': 5, 'trainer slow': 2})
    slow = ScalingCurve.from_points({1: 0.1, 8: 0.2})
    world.tell(ev.NodesJoined(0.0, 'b', nodes(8)))
    world.tell(ev.TrainerSubmitted(0.0, trainer('fast')))
    world.tell(ev.TrainerSubmitted(0.0, Trainer('slow', 1, 8, None, slow)))
    world.until(10.0)
    assert {n: use.nodes for n, (_, use) in world.running.items()} == {'fast': 6, 'slow': 2}
    physics = Trainer('physics', 3, 4, None, slow, group='physics')
    world.tell(ev.TrainerSubmitted(world.at, physics))
    world.until(20.0)  # it can use 4 of its 5 nodes
    found = {n: use.nodes for n, (_, use) in world.running.items()}
    assert found == {'fast': 2, 'slow': 2, 'physics': 4}


def test_shares_that_do_not_fit_are_kept_in_the_order_in_which_they_were_stated() -> None:
    world = World(min_shares={'user anna': 4, 'user bert': 4}, keep_free=1)
    slow = ScalingCurve.from_points({1: 0.1, 8: 0.8})
    world.tell(ev.NodesJoined(0.0, 'b', nodes(7)))
    for name, owner in (('fast', ''), ('a', 'anna'), ('b', 'bert')):
        curve = slow if owner else LINEAR
        world.tell(ev.TrainerSubmitted(0.0, Trainer(name, 1, 8, None, curve, user=owner)))
    world.until(10.0)
    assert {n: use.nodes for n, (_, use) in world.running.items()} == {'a': 4, 'b': 2}


def test_a_share_that_makes_the_problem_infeasible_is_left_out() -> None:
    world = World(min_shares={'user anna': 2}, spans_blocks=False)
    world.tell(ev.TrainerSubmitted(0.0, trainer('net', low=2, user='anna')))
    world.tell(ev.TrainerSubmitted(0.0, trainer('other')))
    for block in 'abc':  # no block has the two nodes that anna's trainer needs
        world.tell(ev.NodesJoined(0.0, block, nodes(1, block)))
    assert [use.trainer for use in world.uses] == ['other']


@given(
    st.lists(
        st.one_of(
            st.builds(range, st.integers(1, 9), st.integers(1, 12)),
            st.lists(st.integers(1, 9), max_size=4),
        ),
        max_size=4,
    ),
    st.integers(0, 20),
)
def test_reachable_sums(counts: list[range | list[int]], most: int) -> None:
    sums = {0}
    for of_one in counts:
        sums |= {n + count for n in sums for count in of_one}
    found = reachable_sums(counts, most)
    assert [n for n in range(40) if found >> n & 1] == sorted(n for n in sums if n <= most)


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for settings, sentence in (
        (
            {'budgets': {'anna': 3.0}},
            "budget 'anna' names no user, group or trainer; write 'trainer NAME', ",
        ),
        ({'budgets': {'total anna': 3.0}}, "budget 'total anna' names no user, group or trainer"),
        ({'budgets': {'user anna': -1.0}}, 'budget of user anna is -1.0 node-seconds'),
        ({'budgets': {'total': math.nan}}, 'budget of total is nan'),
        ({'used_before': {'user': 1.0}}, "use 'user' names no user, group or trainer"),
        ({'min_shares': {'total': 3}}, "minimum share 'total' names no user, group or trainer"),
        (
            {'min_shares': {'user anna': 3}, 'caps': {'user anna': 2}},
            'minimum share of user anna is 3 nodes, above its cap of 2',
        ),
        (
            {'min_shares': {'user anna': 3}, 'max_nodes': 2},
            'minimum share of user anna is 3 nodes, above max_nodes, which is 2',
        ),
        ({'caps': {'trainer net': 3}}, "cap 'trainer net' names no user, group or trainer"),
    ):
        with pytest.raises(BadInput, match=re.escape(sentence)):
            ControllerSettings(**settings)
