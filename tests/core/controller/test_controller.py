"""Scenes from a run, told to the controller event by event."""

import math

import pytest

from parsl_freetrain.core.allocation.problem import Answer, Problem
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.controller.controller import Controller, DecisionFailed
from parsl_freetrain.core.controller.controller_state import Reply
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import (
    AbandonFragment,
    Ending,
    EndTrainer,
    StartFragment,
    StopFragment,
)
from parsl_freetrain.core.model.types import BlockRequest, Hole, ScalingCurve, Trainer

CONCAVE = ScalingCurve.from_points({n: 10.0 * n**0.8 for n in range(1, 65)})


class ClockedController:
    """A controller with a clock; times in seconds, ``after`` since the event before."""

    def __init__(self, settings: ControllerSettings | None = None) -> None:
        self.allocator = MilpAllocator()
        self.controller = Controller(self.allocator, settings)
        self.at = 0.0
        self.reply = Reply()

    def tell(self, event: ev.Event) -> tuple[ev.Action, ...]:
        self.reply = self.controller.handle(event)
        return self.reply.actions

    def submit(
        self,
        name: str,
        low: int = 1,
        high: int = 4,
        curve: ScalingCurve | None = CONCAVE,
        up_s: float = 2.0,
        samples: int = 0,
        fragments: int = 0,
    ) -> tuple[ev.Action, ...]:
        trainer = Trainer(name, low, high, 1000, curve, rescale_up_s=up_s)
        return self.tell(ev.TrainerSubmitted(self.at, trainer, samples, fragments))

    def join(
        self, block: str, *nodes: str, until_s: float | None = None, after: float = 0
    ) -> tuple[ev.Action, ...]:
        self.at += after
        return self.tell(ev.NodesJoined(self.at, block, nodes, until_s))

    def leave(self, *nodes: str) -> tuple[ev.Action, ...]:
        return self.tell(ev.NodesLeft(self.at, nodes))

    def ended(
        self,
        trainer: str,
        fragment: int,
        ending: Ending = Ending.STOPPED,
        samples: int = 0,
        error: str = '',
        after: float = 0,
    ) -> tuple[ev.Action, ...]:
        self.at += after
        return self.tell(ev.FragmentEnded(self.at, trainer, fragment, samples, ending, error))

    def held(self) -> dict[str, tuple[str, ...]]:
        trainers = self.controller.state.trainers.items()
        return {name: t.running.nodes for name, t in trainers if t.running}

    def tick(self, after: float = 1) -> tuple[ev.Action, ...]:
        self.at += after
        return self.tell(ev.Tick(self.at))


def starts(actions: tuple[ev.Action, ...]) -> dict[str, set[str]]:
    """The nodes of each trainer that is started; fails if anything else is among the actions."""
    assert all(isinstance(action, StartFragment) for action in actions), actions
    starts = [action for action in actions if isinstance(action, StartFragment)]
    return {action.trainer: set(action.nodes) for action in starts}


def counts(actions: tuple[ev.Action, ...]) -> dict[str, int]:
    return {trainer: len(nodes) for trainer, nodes in starts(actions).items()}


# Nodes come and go


def test_a_block_whose_opening_is_told_after_its_nodes_keeps_them() -> None:
    history = ClockedController()
    history.submit('net')
    history.join('b', 'n1')
    history.tell(ev.BlockOpened(0.0, 'b', BlockRequest(4)))
    assert history.tell(ev.BlockClosed(0.0, 'b')) == (AbandonFragment('net', 1),)


# Who gets what


def test_a_finished_trainer_s_nodes_go_to_a_running_one_by_a_rescale() -> None:
    history = ClockedController()
    history.submit('a')
    history.submit('b')
    assert counts(history.join('x', 'n1', 'n2', 'n3', 'n4')) == {'a': 2, 'b': 2}
    assert history.ended('a', 1, Ending.FINISHED) == (
        EndTrainer('a', 'finished'),
        StopFragment('b', 1, 'rescale from 2 to 4 nodes'),
    )
    assert starts(history.ended('b', 1, samples=50)) == {'b': {'n1', 'n2', 'n3', 'n4'}}


def test_measured_speed_decides_where_none_was_stated() -> None:
    history = ClockedController()
    history.submit('slow', curve=None)
    history.submit('fast', curve=None)
    history.join('x', 'n1', 'n2', 'n3', 'n4')
    history.tell(ev.FragmentProgressed(1.0, 'slow', 1, 10, 10.0))
    assert history.tell(ev.FragmentProgressed(1.0, 'slow', 1, 20, 10.0)) == ()
    assert history.controller.state.trainers['slow'].running
    told = history.tell(ev.FragmentProgressed(1.0, 'fast', 1, 9999, 1000.0))
    assert StopFragment('fast', 1, 'rescale from 2 to 4 nodes') in told


def test_a_decision_says_what_was_seen_and_what_is_gained_and_is_not_repeated() -> None:
    history = ClockedController()
    history.submit('net')
    actions = history.join('b', 'n1', 'n2')
    decision = history.reply.decision
    assert decision is not None
    assert (decision.trigger, decision.nodes, decision.current) == ('NodesJoined', 2, {'net': 0})
    assert decision.actions == actions
    assert decision.answer.objective == pytest.approx(120 * CONCAVE.rate_at(2))
    assert decision.staying == 0.0
    history.tick()  # sees the fragment run: a new question, answered by staying
    assert history.tick() == ()
    assert history.reply.decision is None


def test_where_blocks_cannot_talk_everybody_keeps_to_the_block_meant_for_it() -> None:
    # 'one' beside a three fills the block of four; in the block of three it would leave no room for
    # the other three.
    history = ClockedController(ControllerSettings(spans_blocks=False))
    history.controller.state.shutting_down = True  # so that all is decided at once
    history.submit('one', low=1, high=1)
    history.submit('three', low=3, high=3)
    history.submit('other three', low=3, high=3)
    history.join('b', 'n1', 'n2', 'n3')
    history.join('c', 'm1', 'm2', 'm3', 'm4')
    history.controller.state.shutting_down = False
    assert counts(history.tick()) == {'one': 1, 'three': 3, 'other three': 3}


# Known ends


def test_a_fragment_about_to_end_by_itself_is_not_stopped() -> None:
    history = ClockedController()
    history.join('b', 'n1', until_s=100.0)
    history.submit('net')
    assert history.join('c', 'm1', 'm2', 'm3', 'm4', after=97) == ()
    assert starts(history.ended('net', 1, after=2)) == {'net': {'m1', 'm2', 'm3', 'm4'}}


def test_a_notice_stops_the_fragments_of_that_block_once() -> None:
    history = ClockedController()
    history.submit('a', high=1)
    history.submit('b', high=1)
    history.join('x', 'n1')
    history.join('y', 'm1', until_s=500.0)
    holder = {node: name for name, (node,) in history.held().items()}
    notice = 'notice: its nodes are about to be taken'
    assert history.tell(ev.BlockEndKnown(10.0, 'x', 30.0)) == (
        StopFragment(holder['n1'], 1, notice),
    )
    assert history.tell(ev.BlockEndKnown(11.0, 'x', 30.0)) == ()
    assert history.tell(ev.BlockEndKnown(11.0, 'x', 29.0)) == ()
    # Later than its deadline: nothing to hurry for.
    assert history.tell(ev.BlockEndKnown(12.0, 'y', 600.0)) == ()
    history.at = 27.0
    assert history.ended(holder['n1'], 1) == ()  # 2 s are too little to start anew


def test_a_block_that_is_taken_before_a_node_has_joined_is_given_back_at_once() -> None:
    history = ClockedController()
    history.submit('net')
    history.tell(ev.BlockOpened(0.0, 'b', BlockRequest(1)))
    assert history.tell(ev.BlockEndKnown(1.0, 'b', 300.0)) == ()
    assert history.tell(ev.BlockEndKnown(2.0, 'b', 290.0)) == (), 'the scheduler corrects itself'
    why = 'its nodes are taken before they have joined'
    assert history.tell(ev.BlockEndKnown(3.0, 'b', 13.0)) == (ev.CloseBlock('b', why),)
    history.tell(ev.BlockClosed(4.0, 'b'))
    history.tell(ev.BlockOpened(5.0, 'c', BlockRequest(1)))
    history.tell(ev.BlockEndKnown(6.0, 'c', 300.0))
    history.join('c', 'n1')
    told = history.tell(ev.BlockEndKnown(9.0, 'c', 19.0))
    assert [type(action) for action in told] == [StopFragment]


# Endings


def test_an_error_costs_a_retry_and_the_last_one_the_trainer() -> None:
    history = ClockedController(ControllerSettings(retries=1))
    history.submit('net')
    history.join('b', 'n1')
    assert starts(history.ended('net', 1, Ending.FAILED, error='ValueError: a')) == {'net': {'n1'}}
    assert history.ended('net', 2, Ending.FAILED, error='ValueError: b') == (
        EndTrainer('net', 'failed', 'ValueError: b'),
    )
    assert starts(history.submit('next')) == {'next': {'n1'}}


def test_preemptions_cost_nothing() -> None:
    history = ClockedController(ControllerSettings(stalls=2))
    history.submit('net')
    for i in range(1, 10):
        assert starts(history.join(f'b{i}', f'n{i}')) == {'net': {f'n{i}'}}
        assert history.leave(f'n{i}') == (AbandonFragment('net', i),)
        assert history.ended('net', i, Ending.PREEMPTED) == ()
    assert 'net' in history.controller.state.trainers


def test_fragments_that_die_without_progress_on_sound_nodes_end_the_trainer() -> None:
    history = ClockedController(ControllerSettings(stalls=2))
    history.submit('net')
    history.join('b', 'n1')
    history.ended('net', 1, Ending.PREEMPTED)
    history.ended('net', 2, Ending.PREEMPTED, samples=10)
    history.ended('net', 3, Ending.PREEMPTED, samples=10)
    history.ended('net', 4, Ending.STOPPED, samples=20)
    history.ended('net', 5, Ending.PREEMPTED, samples=20)
    (action,) = history.ended('net', 6, Ending.PREEMPTED, samples=20, error='rank 1 was killed')
    assert isinstance(action, EndTrainer)
    assert action.state == 'failed'
    assert '2 fragments in a row' in action.why
    assert 'fragment 6: rank 1 was killed' in action.why


@pytest.mark.parametrize('ending', [Ending.PREEMPTED, Ending.FAILED])
def test_failures_in_a_row_are_followed_by_growing_pauses(ending: Ending) -> None:
    """Whatever is wrong for some seconds, such as a full disk, does not end the trainer."""
    history = ClockedController(ControllerSettings(stalls=100, retries=100, idle_block_s=1e6))
    history.submit('net')
    history.join('b', 'n1')
    assert starts(history.ended('net', 1, ending)) == {'net': {'n1'}}  # it may be an accident
    for fragment, pause_s in enumerate([1, 2, 4, 8, 16, 32, 60, 60], 2):
        assert history.ended('net', fragment, ending) == ()
        due_s = history.at + pause_s
        assert history.controller.state.next_change_s() == due_s
        assert history.tick(pause_s - 0.5) == ()
        assert starts(history.tick(0.5)) == {'net': {'n1'}}
    assert starts(history.ended('net', 10, ending, samples=8)) == {'net': {'n1'}}
    assert starts(history.ended('net', 11, ending, samples=8)) == {'net': {'n1'}}


def test_while_a_trainer_pauses_another_one_has_its_nodes_and_it_can_be_cancelled() -> None:
    history = ClockedController(ControllerSettings(stalls=100, trainers_at_a_time=1))
    history.submit('net')
    history.submit('next')
    history.join('b', 'n1')
    history.ended('net', 1, Ending.PREEMPTED)
    assert starts(history.ended('net', 2, Ending.PREEMPTED)) == {'next': {'n1'}}
    assert history.tell(ev.TrainerCancelled(history.at, 'net')) == (EndTrainer('net', 'cancelled'),)
    assert history.tick(5) == ()
    assert history.controller.state.next_change_s() == math.inf


def test_steps_longer_than_the_holes_end_the_trainer_with_a_sentence() -> None:
    history = ClockedController(ControllerSettings(stalls=1, idle_block_s=1e6))
    history.submit('net')

    def hole(number: int, lasts_s: float, samples: int) -> tuple[ev.Action, ...]:
        assert starts(history.join(f'b{number}', f'n{number}', until_s=history.at + 20)) == {
            'net': {f'n{number}'}
        }
        history.at += lasts_s
        assert history.leave(f'n{number}') == (AbandonFragment('net', number),)
        return history.ended('net', number, Ending.PREEMPTED, samples=samples)

    # Nodes that go before their time say nothing, and any progress counts.
    for number, (lasts_s, samples) in enumerate(
        [(20, 0), (20, 0), (3, 0), (20, 0), (20, 8), (20, 8), (20, 8), (3, 8), (20, 8)], 1
    ):
        assert hole(number, lasts_s, samples) == ()
    (action,) = hole(10, 20, 8)
    assert isinstance(action, EndTrainer)
    assert action.state == 'failed'
    assert '4 fragments in a row, up to fragment 10' in action.why
    assert 'a step is longer than the holes' in action.why


def test_a_waiting_trainer_is_cancelled_at_once() -> None:
    history = ClockedController()
    history.submit('net')
    assert history.tell(ev.TrainerCancelled(0.0, 'net')) == (EndTrainer('net', 'cancelled'),)
    assert history.join('b', 'n1') == ()
    assert starts(history.submit('net')) == {'net': {'n1'}}  # the name is free again


def test_a_trainer_that_cannot_go_on_fails_with_the_reason_and_its_nodes_go_on() -> None:
    history = ClockedController()
    history.submit('a', low=2)
    history.join('x', 'n1', 'n2')
    history.submit('b', low=2)
    abandon, end, start = history.tell(ev.TrainerAborted(0.0, 'a', 'its network is gone'))
    assert abandon == AbandonFragment('a', 1)
    assert end == EndTrainer('a', 'failed', 'its network is gone')
    assert start == StartFragment('b', 1, ('n1', 'n2'), None, 0)
    assert history.tell(ev.TrainerAborted(0.0, 'a', 'again')) == ()


def test_what_follows_whatever_the_allocation_is_done_though_the_allocator_fails() -> None:
    class Failing:
        def allocate(self, problem: Problem) -> Answer:
            raise RuntimeError('out of memory')

    controller = Controller(Failing())
    trainer = Trainer('a', 1, 1, 10)
    with pytest.raises(DecisionFailed) as caught:
        first = ev.TrainerSubmitted(0.0, trainer), ev.TrainerAborted(0.0, 'a', 'no')
        joined = ev.NodesJoined(0.0, 'b', ('n',))
        controller.handle_all((*first, ev.TrainerSubmitted(0.0, trainer), joined))
    assert 'The allocator failed: out of memory. Nothing new' in str(caught.value)
    assert caught.value.actions == (EndTrainer('a', 'failed', 'no'),)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert set(controller.state.pool.nodes) == {'n'}


def test_nobody_is_stopped_for_nodes_that_a_cancelled_trainer_still_holds() -> None:
    history = ClockedController()
    history.submit('a')
    history.submit('b')
    history.join('x', 'n1', 'n2', 'n3', 'n4')
    assert history.tell(ev.TrainerCancelled(0.0, 'a')) == (StopFragment('a', 1, 'cancelled'),)
    stop = StopFragment('b', 1, 'rescale from 2 to 4 nodes')
    assert history.ended('a', 1) == (EndTrainer('a', 'cancelled'), stop)


def test_a_trainer_that_finishes_while_it_is_cancelled_has_finished() -> None:
    history = ClockedController()
    history.submit('net')
    history.join('b', 'n1')
    history.tell(ev.TrainerCancelled(0.0, 'net'))
    assert history.ended('net', 1, Ending.FINISHED, samples=1000) == (
        EndTrainer('net', 'finished'),
    )


def test_shutdown_stops_everything_with_a_checkpoint_and_starts_nothing() -> None:
    history = ClockedController()
    history.submit('a', high=1)
    history.submit('b', high=1)
    history.join('x', 'n1', 'n2')
    stops = tuple(StopFragment(name, 1, 'shutdown') for name in 'ab')
    assert history.tell(ev.ShutdownRequested(1.0)) == stops
    assert history.tell(ev.ShutdownRequested(1.0)) == ()
    assert history.ended('a', 1, samples=5) == ()
    assert history.leave('n1', 'n2') == (AbandonFragment('b', 1),)
    assert history.ended('b', 1, Ending.PREEMPTED) == ()
    assert history.join('y', 'm1') == ()
    assert history.submit('c') == ()
    assert history.tell(ev.HolesSeen(2.0, (Hole(4),))) == ()


def test_a_total_in_epochs_is_filled_in() -> None:
    history = ClockedController()
    history.tell(ev.TrainerSubmitted(0.0, Trainer('net', 1, 1)))
    history.tell(ev.TotalKnown(1.0, 'net', 1797))
    assert history.controller.state.trainers['net'].trainer == Trainer('net', 1, 1, 1797)
    with pytest.raises(BadInput, match='total_samples is 0'):
        history.tell(ev.TotalKnown(1.0, 'net', 0))


# What the caller gets wrong


def test_a_name_that_runs_already_is_refused_and_changes_nothing() -> None:
    history = ClockedController()
    history.submit('net')
    history.join('b', 'n1')
    with pytest.raises(ValueError, match="'net' is running already"):
        history.submit('net')
    assert starts(history.ended('net', 1, samples=3)) == {'net': {'n1'}}


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(TypeError, match='does not know the event'):
        ClockedController().tell(ev.Event(0.0))
