"""Decisions about several events at once, known ends, settings that hold the controller back."""

from parsl_freetrain.core.allocation.objectives import Candidate
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import Ending, StartFragment, StopFragment
from parsl_freetrain.core.model.types import Hole, ScalingCurve, Trainer
from tests.support.allocation import Remembering

LINEAR = ScalingCurve.from_points({1: 10.0, 64: 640.0})


class CountingController:
    def __init__(self, **settings: object) -> None:
        self.allocator = Remembering()
        self.controller = Controller(self.allocator, ControllerSettings(**settings))  # type: ignore[arg-type]

    def tell(self, *events: ev.Event) -> tuple[ev.Action, ...]:
        return self.controller.handle_all(events).actions

    def submit(self, name: str, at: float = 0.0, **more: object) -> tuple[ev.Action, ...]:
        low, high, down_s = more.get('low', 1), more.get('high', 64), more.get('down_s', 2.0)
        trainer = Trainer(name, low, high, 10**9, LINEAR, rescale_up_s=2.0, rescale_down_s=down_s)  # type: ignore[arg-type]
        return self.tell(ev.TrainerSubmitted(at, trainer))

    def held(self, name: str) -> tuple[str, ...]:
        running = self.controller.state.trainers[name].running
        return running.nodes if running else ()


def names(count: int, letter: str = 'n') -> tuple[str, ...]:
    return tuple(f'{letter}{i:02d}' for i in range(count))


def test_what_happens_at_once_is_decided_at_once() -> None:
    history = CountingController()
    history.submit('net')
    history.tell(ev.NodesJoined(0.0, 'b', names(8)))
    asked = len(history.allocator.asked)
    reply = history.controller.handle_all(
        (ev.NodesLeft(10.0, names(4)), ev.NodesJoined(10.0, 'c', names(6, 'm')))
    )
    assert reply.decision is not None
    assert (reply.decision.trigger, reply.decision.nodes) == ('NodesLeft+NodesJoined', 10)
    assert len(history.allocator.asked) == asked + 1
    ended = ev.FragmentEnded(10.0, 'net', 1, 0, Ending.PREEMPTED)
    assert history.tell(ended)[0].__class__ is StartFragment
    assert set(history.held('net')) == {*names(8)[4:], *names(6, 'm')}
    assert len(history.allocator.asked) == asked + 1  # the plan stands while it is carried out
    assert history.controller.handle_all(()).actions == ()


def test_a_plan_is_asked_for_anew_when_something_else_happens_before_it_is_carried_out() -> None:
    history = CountingController()
    history.submit('net')
    history.tell(ev.NodesJoined(0.0, 'b', names(2)))
    assert isinstance(history.tell(ev.NodesJoined(1.0, 'c', names(2, 'm')))[0], StopFragment)
    asked = len(history.allocator.asked)
    history.tell(ev.NodesJoined(2.0, 'd', names(1, 'o')))
    assert len(history.allocator.asked) == asked + 1
    history.tell(ev.FragmentEnded(3.0, 'net', 1, 5, Ending.STOPPED))
    assert len(history.held('net')) == 5


def test_a_node_that_goes_is_worth_what_it_has_left() -> None:
    history = CountingController(horizon_s=120.0)
    history.submit('net', down_s=3.0)
    history.tell(ev.NodesJoined(0.0, 'b', names(8)))
    # One more node for 20 s: 200 samples; growing costs 2 x 80, and shrinking again 3 x 90.
    assert history.tell(ev.NodesJoined(10.0, 'c', ('m',), 30.0)) == ()
    problem = history.allocator.asked[-1]
    blocks = [(block.nodes, block.remaining_s) for block in problem.blocks]
    assert blocks == [(1, 20.0), (8, float('inf'))]
    assert problem.bids[0].held == (0, 8)
    # Another trainer has nothing to lose.
    assert history.submit('new', at=11.0, high=1) == (StartFragment('new', 1, ('m',), 30.0, 0),)
    # With the same end beyond the horizon it is as good as any.
    assert isinstance(history.tell(ev.NodesJoined(12.0, 'd', ('o',), 900.0))[0], StopFragment)
    assert history.allocator.asked[-1].nodes == 10


def test_a_trainer_is_left_alone_for_a_while_after_a_rescale_but_not_when_it_loses_nodes() -> None:
    history = CountingController(min_rescale_s=300.0)
    history.submit('net')
    history.tell(ev.NodesJoined(0.0, 'b', names(2)))
    # The first one is free.
    assert isinstance(history.tell(ev.NodesJoined(100.0, 'c', names(2, 'm')))[0], StopFragment)
    history.tell(ev.FragmentEnded(101.0, 'net', 1, 5, Ending.STOPPED))
    assert history.tell(ev.NodesJoined(200.0, 'c', names(2, 'o'))) == ()
    assert history.allocator.asked[-1].bids[0].fixed
    assert history.tell(ev.Tick(399.0)) == ()
    assert isinstance(history.tell(ev.Tick(400.0))[0], StopFragment)
    history.tell(ev.FragmentEnded(401.0, 'net', 2, 9, Ending.STOPPED))
    history.tell(ev.NodesLeft(402.0, names(2)))
    history.tell(ev.FragmentEnded(402.0, 'net', 3, 9, Ending.PREEMPTED))
    assert len(history.held('net')) == 4


def test_nodes_kept_free_and_the_cap_on_all() -> None:
    each = ({'keep_free': 3}, 5), ({'max_nodes': 2}, 2), ({'keep_free': 7, 'max_nodes': 6}, 1)
    for settings, expected in each:
        history = CountingController(**settings)
        history.submit('net')
        history.tell(ev.NodesJoined(0.0, 'b', names(8)))
        assert len(history.held('net')) == expected
    history = CountingController(max_nodes=2)
    history.submit('net')
    (opened,) = history.tell(ev.HolesSeen(0.0, (Hole(9),)))
    assert isinstance(opened, ev.OpenBlock)
    assert opened.request.nodes == 2


def test_an_objective_of_its_own() -> None:
    worth = {'dear': LINEAR, 'cheap': ScalingCurve((1, 64), (1.0, 64.0))}

    def metric(candidate: Candidate) -> ScalingCurve:
        return worth[candidate.name]

    controller = Controller(MilpAllocator(), None, metric)
    for name in ('cheap', 'dear'):
        controller.handle(ev.TrainerSubmitted(0.0, Trainer(name, 1, 3, 100, LINEAR)))
    controller.handle(ev.NodesJoined(0.0, 'b', names(4)))
    trainers = controller.state.trainers.items()
    held = {name: len(t.running.nodes) for name, t in trainers if t.running}
    assert held == {'dear': 3, 'cheap': 1}


# What trainers and administrators ask for

PLENTY = 10**9
SLOW = ScalingCurve.from_points({1: 1.0, 64: 64.0})


def submitted(history: CountingController, *trainers: Trainer, at: float = 0.0) -> None:
    for trainer in trainers:
        history.tell(ev.TrainerSubmitted(at, trainer))


def planned(history: CountingController) -> dict[str, int]:
    """What the last decision gives to whom."""
    return history.controller._planner._plan.answer.allocation  # type: ignore[union-attr]


def test_users_and_groups_have_no_more_than_their_caps() -> None:
    history = CountingController(caps={'user anna': 3, 'group physics': 5, 'group empty': 0})
    submitted(
        history,
        Trainer('a', 1, 64, PLENTY, LINEAR, user='anna', group='physics'),
        Trainer('b', 1, 64, PLENTY, LINEAR, user='anna'),
        Trainer('c', 1, 64, PLENTY, LINEAR, group='physics'),
    )
    history.tell(ev.NodesJoined(0.0, 'b', names(20)))
    count = {name: len(history.held(name)) for name in 'abc'}
    assert count['a'] + count['b'] == 3
    assert count['a'] + count['c'] == 5
    submitted(history, Trainer('d', 1, 64, PLENTY, LINEAR), at=1.0)
    assert len(history.held('d')) == 20 - sum(count.values())


def test_what_is_being_stopped_counts_for_limits() -> None:
    flat = ScalingCurve.from_points({1: 10, 2: 20, 4: 21})
    steep = ScalingCurve.from_points({1: 10, 3: 12, 4: 100})
    limits: list[dict[str, object]] = [{'max_nodes': 6}, {'caps': {'user u': 6}}, {'keep_free': 4}]
    for limit in limits:
        history = CountingController(horizon_s=1000.0, **limit)
        history.tell(ev.NodesJoined(0.0, 'b', names(10)))
        submitted(history, Trainer('a', 1, 4, PLENTY, flat, 1.0, 1.0, user='u'))
        submitted(history, Trainer('b', 1, 4, PLENTY, steep, 1.0, 1.0, user='u'))
        assert planned(history) == {'a': 2, 'b': 4}
        assert (len(history.held('a')), len(history.held('b'))) == (4, 0)
        history.tell(ev.FragmentEnded(1.0, 'a', 1, 10, Ending.STOPPED))
        assert (len(history.held('a')), len(history.held('b'))) == (2, 4)


def test_a_deadline_gets_the_nodes_that_it_takes_and_more_as_it_falls_behind() -> None:
    """A node trains 1 sample/s; 300 in 100 s take 3 nodes, and 250 that are left in 50 s take 5."""
    history = CountingController(metric='deadline', horizon_s=40.0)
    submitted(
        history,
        Trainer('urgent', 1, 8, 300, SLOW, 0.0, 0.0, finish_by_s=1100.0),
        Trainer('other', 1, 8, PLENTY, SLOW, priority=2.0),
        at=1000.0,
    )
    history.tell(ev.NodesJoined(1000.0, 'b', names(10)))
    assert planned(history) == {'urgent': 3, 'other': 7}
    history.tell(ev.FragmentProgressed(1005.0, 'urgent', 1, 10, 1.0))
    asked = len(history.allocator.asked)
    history.tell(ev.Tick(1005.0))
    assert len(history.allocator.asked) == asked, 'a quarter of the horizon has not passed'
    history.tell(ev.FragmentProgressed(1050.0, 'urgent', 1, 50, 1.0))
    history.tell(ev.Tick(1050.0))
    assert planned(history) == {'urgent': 5, 'other': 5}
    assert len(history.allocator.asked) == asked + 1


def test_a_formula_that_has_no_value_any_more_leaves_the_worth_as_it_was() -> None:
    history = CountingController(metric='rate / deadline_s', horizon_s=40.0)
    submitted(history, Trainer('a', 1, 8, 300, LINEAR, finish_by_s=100.0))
    history.tell(ev.NodesJoined(0.0, 'b', names(4)))
    history.tell(ev.NodesJoined(100.0, 'b', names(5)))
    assert planned(history) == {'a': 5}


def test_who_waits_grows_in_worth() -> None:
    """One node, two trainers; b takes over when its wait weighs more than the change."""
    history = CountingController(metric='rate * (1 + waited_s / 10)', horizon_s=40.0)
    submitted(history, Trainer('a', 1, 1, PLENTY, LINEAR), Trainer('b', 1, 1, PLENTY, LINEAR))
    history.tell(ev.NodesJoined(0.0, 'b', names(1)))
    first, second = ('a', 'b') if history.held('a') else ('b', 'a')
    assert any(isinstance(action, StopFragment) for action in history.tell(ev.Tick(20.0)))
    history.tell(ev.FragmentEnded(21.0, first, 1, 5, Ending.STOPPED))
    assert history.held(second)
