"""Replicas of one training: who wants nodes when, and how they end."""

from dataclasses import replace
from typing import Any

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import Ending, EndTrainer, StartFragment, StopFragment
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from tests.core.controller.test_controller import ClockedController

ONE = ScalingCurve.from_points({1: 10.0})
ROUND, TOTAL = 20, 40


def submit(history: ClockedController, samples: tuple[int, ...] = (0, 0, 0), **place: Any) -> None:
    for replica, there in enumerate(samples):
        how: Any = {'training': 'gpt', 'replicas': len(samples), **place}
        trainer = Trainer(f'r{replica}', 1, 1, TOTAL, ONE, **how)
        history.tell(ev.TrainerSubmitted(history.at, trainer, there))


def started(actions: tuple[ev.Action, ...]) -> list[str]:
    return [action.trainer for action in actions if isinstance(action, StartFragment)]


def test_pieces_of_a_round_take_turns_and_the_next_round_waits_for_all() -> None:
    history = ClockedController()
    submit(history)
    (first,) = started(history.join('b', 'n1'))
    history.tell(ev.RoundKnown(1.0, first, ROUND))
    (second,) = started(history.ended(first, 1, samples=ROUND))
    (third,) = started(history.join('c', 'n2'))
    assert {first, second, third} == {'r0', 'r1', 'r2'}
    assert started(history.ended(second, 1, samples=ROUND)) == []
    assert history.controller.state.active.keys() == {third}  # so one node is wanted
    history.submit('other', 1, 1)
    assert 'other' in history.held()  # the end of a round is not lost
    assert started(history.ended(third, 1, Ending.PREEMPTED, samples=10)) == [third]
    assert len(started(history.ended(third, 2, samples=ROUND))) == 1


def test_with_overlap_replicas_are_a_round_ahead_except_at_the_end() -> None:
    history = ClockedController()
    history.join('b', 'n1', 'n2', 'n3')
    submit(history, samples=(ROUND, 5, TOTAL), round_samples=ROUND, overlap=1)
    assert history.held().keys() == {'r0', 'r1'}
    assert started(history.ended('r0', 1, samples=TOTAL)) == []
    assert len(started(history.ended('r1', 1, samples=ROUND))) == 1


def test_the_first_replica_ends_the_training_after_the_others() -> None:
    history = ClockedController(ControllerSettings(trainers_at_a_time=1))
    submit(history, samples=(ROUND, ROUND), round_samples=ROUND)
    assert started(history.join('b', 'n1')) == ['r1']  # r0 had to wait for its submission
    assert history.ended('r1', 1, Ending.FINISHED, samples=TOTAL) == (
        EndTrainer('r1', 'finished'),
        StartFragment('r0', 1, ('n1',), None, ROUND),
    )
    assert started(history.ended('r0', 1, samples=TOTAL)) == ['r0']  # what is behind its loop
    assert history.ended('r0', 2, Ending.FINISHED, samples=TOTAL) == (EndTrainer('r0', 'finished'),)


def test_earlier_rounds_and_pieces_that_are_nearly_done_come_first() -> None:
    for overlap, samples, nodes, expected in (
        (0, (5, 15, 10), ('n1',), ['r1']),
        (0, (15, 5, 15), ('n1', 'n2'), ['r0', 'r2']),
        (1, (ROUND + 15, 5, 0), ('n1',), ['r1']),
        (1, (ROUND + 15, 0, 5), ('n1', 'n2'), ['r1', 'r2']),
    ):
        history = ClockedController()
        submit(history, samples, round_samples=ROUND, overlap=overlap)
        assert sorted(started(history.join('b', *nodes))) == expected, samples
        assert history.reply.decision is not None
        given = history.reply.decision.answer.allocation
        assert sorted(name for name, count in given.items() if count) == expected


def test_a_piece_with_less_to_train_gets_the_hole_that_ends_earlier() -> None:
    for samples, short in (((0, 10), 'r1'), ((10, 0), 'r0'), ((ROUND + 10, 0), 'r0')):
        history = ClockedController()
        history.controller.state.shutting_down = True  # so that all is decided at once
        submit(history, samples, round_samples=ROUND, overlap=1)
        history.join('long', 'n1')
        history.controller.state.shutting_down = False
        history.join('short', 'n2', until_s=30)
        assert history.held()[short] == ('n2',)


def test_a_hole_shorter_than_a_piece_is_used_unless_it_is_too_short_to_save() -> None:
    for seconds, begun in ((20, 1), (4, 0)):
        history = ClockedController(ControllerSettings(min_hole_s=0))
        submit(history, round_samples=TOTAL * 1000)  # a hole lasts for a few of these only
        history.join('b', 'n1')
        (first,) = history.held()
        history.leave('n1')
        times: Any = {'start_s': 3.0, 'step_s': 1.0, 'checkpoint_s': 0.5}
        history.tell(ev.FragmentEnded(history.at, first, 1, 5, Ending.PREEMPTED, **times))
        assert len(started(history.join('c', 'n2', until_s=history.at + seconds))) == begun


def test_a_piece_that_ends_before_a_rescale_would_pay_keeps_its_nodes() -> None:
    for reached, rescaled in ((10, True), (18, False)):
        history = ClockedController()
        two = ScalingCurve.from_points({1: 1.0, 2: 2.0})
        trainer = Trainer('r0', 1, 2, TOTAL, two, rescale_up_s=4, training='gpt', replicas=1)
        history.tell(ev.TrainerSubmitted(0.0, replace(trainer, round_samples=ROUND), 0))
        history.join('b', 'n1')
        history.tell(ev.FragmentProgressed(1.0, 'r0', 1, reached, 1.0, {}))
        actions = history.join('b', 'n2')
        assert any(isinstance(action, StopFragment) for action in actions) is rescaled


def test_resumed_replicas_wait_whatever_they_know_of_the_round() -> None:
    history = ClockedController()
    history.join('b', 'n1', 'n2', 'n3')
    submit(history, samples=(ROUND, 5, 10), round_samples=ROUND)
    assert history.held().keys() == {'r1', 'r2'}
    history = ClockedController()
    history.join('b', 'n1')
    submit(history, samples=(ROUND, 5))
    history.tell(ev.RoundKnown(1.0, 'r0', ROUND))
    assert started(history.ended('r0', 1, samples=ROUND)) == ['r1']


def test_replicas_that_cannot_go_on_pause_ever_longer() -> None:
    history = ClockedController()
    submit(history, samples=(ROUND, ROUND), round_samples=ROUND)
    history.join('b', 'n1')
    begun = []
    for _ in range(4):
        (name,) = history.held()
        begun += started(history.ended(name, history.controller.state.trainers[name].fragments))
    assert len(begun) < 4 and not history.held()
    assert started(history.tick(after=10))


def test_the_first_one_does_not_wait_for_ever_for_those_that_have_ended() -> None:
    for others_end in (False, True):
        history = ClockedController()
        submit(history, samples=(TOTAL, TOTAL), round_samples=ROUND)
        history.tell(ev.ReplicaReached(0.0, 'gpt', 'r2', None))  # in another executor
        history.join('b', 'n1', 'n2')
        if others_end:
            history.ended('r1', 1, Ending.FINISHED, samples=TOTAL)
        why = ''
        for number in range(1, 9):
            if 'r0' in history.held():
                told = history.ended('r0', number, samples=TOTAL)
                why += ''.join(one.why for one in told if isinstance(one, EndTrainer))
            history.tick(after=60)
        assert ('damaged (call the function again' in why) is others_end


def test_one_that_fails_or_is_cancelled_ends_all() -> None:
    history = ClockedController()
    submit(history)
    history.join('b', 'n1', 'n2')
    history.tell(ev.RoundKnown(1.0, 'r0', ROUND))
    actions = history.tell(ev.TrainerAborted(1.0, 'r1', 'no way'))
    because = "its replica 'r1' has ended: no way"
    assert EndTrainer('r1', 'failed', 'no way') in actions
    assert EndTrainer('r2', 'failed', because) in actions
    assert StopFragment('r0', 1, because) in actions
    assert history.ended('r0', 1, samples=8) == (EndTrainer('r0', 'failed', because),)

    submit(history, samples=(ROUND,) * 30, round_samples=ROUND)
    waits = next(name for name in history.controller.state.trainers if name not in history.held())
    actions = history.tell(ev.TrainerCancelled(2.0, waits))
    ended = [action.trainer for action in actions if isinstance(action, EndTrainer)]
    assert len(ended) == 28 and len(history.held()) == 2  # these two save first
    for name in list(history.held()):
        assert history.ended(name, 1, samples=ROUND) == (EndTrainer(name, 'cancelled'),)
    assert not history.controller.state.trainers
