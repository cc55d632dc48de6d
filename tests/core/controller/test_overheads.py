"""What is measured of fragments: what it changes in bids, and how short a hole may be."""

import math
from typing import Any

import pytest

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.overheads import Measured
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Hole, ScalingCurve, Trainer
from tests.support.allocation import Remembering

CURVE = ScalingCurve((1, 2), (10.0, 19.0))


def costs(asked: Remembering) -> tuple[float, float]:
    (bid,) = asked.asked[-1].bids
    return bid.rescale_up_s, bid.rescale_down_s


def test_measured_costs_take_the_place_of_assumed_ones_but_not_of_stated_ones() -> None:
    for stated, expected in (
        ((), [(2.0, 2.0), (0.5, 2.0), (0.5, 1.0), (0.75, 1.0)]),
        (('up',), [(2.0, 2.0), (2.0, 2.0), (2.0, 1.0), (2.0, 1.0)]),
        (('up', 'down'), [(2.0, 2.0)] * 4),
    ):
        asked = Remembering()
        controller = Controller(asked, ControllerSettings())
        controller.handle(ev.NodesJoined(0.0, 'b', ('n1',)))
        trainer = Trainer('net', 1, 2, curve=CURVE, stated_costs=stated)
        controller.handle(ev.TrainerSubmitted(0.0, trainer))
        seen = [costs(asked)]
        for at, (before, after, seconds) in enumerate([(1, 2, 0.5), (2, 1, 1.0), (1, 2, 1.0)], 1):
            controller.handle(ev.Rescaled(at, 'net', 1, before, after, seconds))
            # The question is another one in any case.
            controller.handle(ev.NodesJoined(at, f'b{at}', (f'm{at}',)))
            seen.append(costs(asked))
        assert seen == [pytest.approx(each) for each in expected]


@pytest.mark.parametrize('seconds', [-1.0, math.nan, math.inf])
def test_what_is_no_time_counts_for_nothing(seconds: float) -> None:
    measured = Measured()
    measured.rescaled(up=True, seconds=seconds)
    measured.timed(seconds, seconds, seconds)
    assert measured == Measured()


def test_longer_times_count_at_once_and_shorter_ones_by_halves() -> None:
    measured = Measured()
    for start_s in (1.0, 3.0, 1.0):
        measured.timed(start_s, None, 0.5)
    assert (measured.start_s, measured.step_s, measured.checkpoint_s) == (2.0, None, 0.5)


def timed(
    at: float, name: str, fragment: int, start_s: float, step_s: float, checkpoint_s: float | None
) -> ev.FragmentEnded:
    """A fragment took so long."""
    took: Any = {'start_s': start_s, 'step_s': step_s, 'checkpoint_s': checkpoint_s}
    return ev.FragmentEnded(at, name, fragment, 0, ev.Ending.PREEMPTED, **took)


def opened(controller: Controller, at: float, seconds: float) -> list[float | None]:
    reply = controller.handle(ev.HolesSeen(at, (Hole(1, at + seconds),)))
    opens = [action for action in reply.actions if isinstance(action, ev.OpenBlock)]
    return [action.request.walltime_s for action in opens]


def test_a_hole_is_used_if_start_step_and_checkpoint_fit_and_not_otherwise() -> None:
    controller = Controller(Remembering(), ControllerSettings(min_hole_s=5.0))
    controller.handle(ev.TrainerSubmitted(0.0, Trainer('net', 1, 1, curve=CURVE)))
    assert opened(controller, 0.0, 4.9) == []
    controller.handle(timed(1.0, 'net', 1, 0.3, 0.2, None))
    assert opened(controller, 1.0, 4.9) == []  # not everything is known
    controller.handle(timed(2.0, 'net', 2, 0.3, 0.2, 0.1))
    assert controller.state.shortest_s == pytest.approx(0.3 + 0.2 + 2 * 0.1 + 0.5)
    assert opened(controller, 2.0, 1.1) == []
    assert opened(controller, 2.0, 1.3) == [pytest.approx(1.3)]
    # On its nodes a fragment starts, though they stay for less than min_hole_s.
    reply = controller.handle(ev.NodesJoined(3.0, 'b', ('n1',), 4.4))
    assert [type(action) for action in reply.actions] == [ev.StartFragment]
    # Slow steps make it longer than min_hole_s, and nothing is started in less.
    controller.handle(timed(4.0, 'net', 1, 0.3, 30.0, 0.1))
    assert opened(controller, 4.0, 29.0) == []
    assert controller.handle(ev.NodesJoined(4.0, 'c', ('n2',), 33.0)).actions == ()
    assert [
        type(action)
        for action in controller.handle(ev.NodesJoined(5.0, 'd', ('n3',), 50.0)).actions
    ] == [ev.StartFragment]


def started(controller: Controller, event: ev.NodesJoined) -> list[tuple[str, tuple[str, ...]]]:
    actions = controller.handle(event).actions
    return [(one.trainer, one.nodes) for one in actions if isinstance(one, ev.StartFragment)]


def test_what_a_trainer_that_is_over_could_use_does_not_count() -> None:
    controller = Controller(Remembering(), ControllerSettings(min_hole_s=5.0))
    for name in ('quick', 'new'):
        controller.handle(ev.TrainerSubmitted(0.0, Trainer(name, 1, 1, curve=CURVE)))
    controller.handle(timed(1.0, 'quick', 1, 0.3, 0.2, 0.1))
    assert opened(controller, 1.0, 1.3) == [pytest.approx(1.3)]
    controller.handle(ev.TrainerCancelled(2.0, 'quick'))
    assert controller.state.shortest_s == 5.0
    assert opened(controller, 2.0, 1.3) == []


def test_nothing_is_started_in_a_hole_that_is_too_short_for_it() -> None:
    controller = Controller(Remembering(), ControllerSettings(min_hole_s=5.0))
    controller.handle(ev.TrainerSubmitted(0.0, Trainer('slow', 1, 1, curve=CURVE)))
    controller.handle(timed(1.0, 'slow', 1, 1.0, 20.0, 0.5))
    quick = Trainer('quick', 1, 1, curve=ScalingCurve((1,), (1.0,)))
    controller.handle(ev.TrainerSubmitted(1.0, quick))
    controller.handle(timed(1.0, 'quick', 1, 0.3, 0.2, 0.1))
    assert opened(controller, 1.0, 1.3) == [pytest.approx(1.3)]
    # The slow one is worth more, but not here.
    assert started(controller, ev.NodesJoined(2.0, 'b', ('n1',), 12.0)) == [('quick', ('n1',))]
    assert started(controller, ev.NodesJoined(3.0, 'c', ('n2',), 60.0)) == [('slow', ('n2',))]


def test_a_trainer_that_runs_is_not_stopped_for_nodes_that_it_cannot_start_on() -> None:
    controller = Controller(Remembering(), ControllerSettings(min_hole_s=5.0))
    controller.handle(ev.TrainerSubmitted(0.0, Trainer('slow', 1, 2, curve=CURVE)))
    controller.handle(timed(1.0, 'slow', 1, 1.0, 20.0, 0.5))
    assert started(controller, ev.NodesJoined(2.0, 'b', ('n1',), 60.0)) == [('slow', ('n1',))]
    assert controller.handle(ev.NodesJoined(3.0, 'c', ('n2',), 25.0)).actions == ()
    # Its own nodes end in less by now: it goes on with them.
    assert {
        type(action)
        for action in controller.handle(ev.NodesJoined(45.0, 'd', ('n3',), 65.0)).actions
    } == {ev.CloseBlock}


def test_what_takes_longer_than_the_horizon_is_not_begun_on_nodes_that_go_before() -> None:
    controller = Controller(Remembering(), ControllerSettings(horizon_s=10.0))
    controller.handle(ev.TrainerSubmitted(0.0, Trainer('slow', 1, 2, curve=CURVE)))
    controller.handle(timed(1.0, 'slow', 1, 1.0, 20.0, 0.5))
    assert started(controller, ev.NodesJoined(2.0, 'b', ('n1',), 22.0)) == []
    assert started(controller, ev.NodesJoined(3.0, 'c', ('n2',), 30.0)) == [('slow', ('n2',))]
