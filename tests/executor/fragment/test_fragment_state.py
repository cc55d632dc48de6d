"""What the members of a fragment said, brought to a verdict."""

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import cloudpickle
import pytest
import tblib
import torch

from parsl_freetrain import LocalSite, Timeouts
from parsl_freetrain.core.model.events import (
    CheckpointSaved,
    Ending,
    FragmentProgressed,
    FragmentStarted,
    StartFragment,
)
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.event_loop import EventLoop
from parsl_freetrain.executor.fragment.control_channel import MemberDisconnected
from parsl_freetrain.executor.fragment.fragment_state import (
    ANSWER_S,
    LONE_ANSWER_S,
    LeftState,
    RunningFragment,
)
from parsl_freetrain.executor.fragment.listener import Listener
from parsl_freetrain.executor.fragment.member_order import RankResult
from parsl_freetrain.executor.fragment.members import Members
from parsl_freetrain.executor.fragment.runner import FragmentRunner
from parsl_freetrain.executor.fragment.trainer_record import furthest, left_states
from parsl_freetrain.executor.fragment.watchdog import LOOK_S, GiveUp, NodeSilent, Watchdog
from parsl_freetrain.executor.stream import Stream
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import RankEnd as Ending_
from tests.support.parsl_sides import NoParsl


class Told:
    """Keeps what members are told."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, key: Any, message: Any) -> None:
        self.messages.append((key[2], message))


members = Members(Told(), cast(Any, None))  # type: ignore[arg-type]
START = Checkpoint('cnn', '', 0, 0)


def running_fragment(nodes: int = 2) -> RunningFragment:
    return RunningFragment(
        StartFragment('cnn', 7, tuple(f'n{i}' for i in range(nodes)), None, 0), 0.0, START
    )


def result(rank: int, node: str = '', **more: Any) -> RankResult:
    return RankResult(rank, node, f'/logs/rank-{rank}.log', **more)


def outcome(rank: int, how: Ending_, node: str = '', **more: Any) -> RankResult:
    return result(rank, node, outcome=msg.Outcome(how, **more))


def user_error(error: Exception) -> msg.RankError:
    try:
        raise error
    except Exception as raised:
        trace = tblib.Traceback(sys.exc_info()[2]).as_dict()
        pickled = cloudpickle.dumps((raised, trace))
        return msg.RankError(type(raised).__name__, str(raised), 'Traceback of the node', pickled)


def test_the_end_and_the_checkpoint_are_rank_0s_whoever_came_back_first() -> None:
    fragment = running_fragment()
    # The news of the last one are still on their way.
    fragment.note(Checkpoint('cnn', '/c/3', 300, 7))
    fragment.settled = {
        1: [outcome(1, 'finished', path=None, samples=900)],
        0: [outcome(0, 'finished', path='/c/9', samples=900, handed_in='key')],
    }
    verdict = fragment.result()
    assert verdict.ending is Ending.FINISHED
    assert verdict.checkpoint.handed_in == 'key'
    assert verdict.checkpoint == Checkpoint('cnn', '/c/9', 900, 7)


def test_a_checkpoint_keeps_the_number_of_the_fragment_that_wrote_it() -> None:
    """Also where a later one had nothing to train."""
    fragment = running_fragment(1)
    fragment.checkpoint = Checkpoint('cnn', '/c/8', 800, 6)
    fragment.settled = {0: [outcome(0, 'stopped', path='/c/8', samples=800)]}
    assert fragment.result().checkpoint == fragment.checkpoint == Checkpoint('cnn', '/c/8', 800, 6)


OUT_OF_MEMORY = msg.RankError('OutOfMemoryError', 'CUDA out of memory.', 'Traceback of the node')
ASSERTION = torch.AcceleratorError('CUDA error: device-side assert triggered\nCompile with ...')
PEER = msg.RankError('E', 'Connection closed by peer [10.0.0.2]:1', '')


@pytest.mark.parametrize(
    ('lost', 'settled', 'ending', 'says'),
    [
        # Without rank 0's word it is not finished; a survivor's error is that of a lost peer.
        (['n0'], {1: [outcome(1, 'finished', samples=900)]}, Ending.PREEMPTED, '1 of its 2 nodes'),
        (['n1'], {0: [outcome(0, 'error', error=PEER)]}, Ending.PREEMPTED, '1 of its 2 nodes'),
        # An assertion of a device: the log, and how to find the line.
        (
            [],
            {
                0: [outcome(0, 'peer-lost')],
                1: [outcome(1, 'error', 'x12', error=user_error(ASSERTION))],
            },
            Ending.FAILED,
            r'rank 1 on x12 said .*/logs/rank-1\.log.*CUDA_LAUNCH_BLOCKING=1',
        ),
        # Too little memory is told from an error of the function and from a preemption.
        (
            [],
            {
                0: [outcome(0, 'peer-lost', memory=7)],
                1: [outcome(1, 'error', 'x12', error=OUT_OF_MEMORY, memory=9)],
            },
            'memory',
            r'^rank 1 on x12 said OutOfMemoryError: CUDA out of memory\.; its output is in '
            r'/logs/rank-1\.log$',
        ),
        (
            [],
            {0: [outcome(0, 'peer-lost')], 1: [result(1, 'x12', status=-9, out_of_memory=True)]},
            'memory',
            '^rank 1 on x12 was ended by the kernel, since memory was full; its output is in ',
        ),
        (
            ['n1 for memory'],
            {0: [outcome(0, 'peer-lost')]},
            'memory',
            r'^1 of its 2 nodes were lost: n1 \(its job ran out of memory\)$',
        ),
        # A dead rank is named with its signal and log,
        ([], {0: [result(0, status=-9)], 1: []}, Ending.PREEMPTED, r'SIGKILL.*/logs/rank-0\.log'),
        ([], {0: [result(0, status=-11)], 1: []}, Ending.PREEMPTED, 'SIGSEGV'),
        ([], {0: [result(0, status=3)], 1: []}, Ending.PREEMPTED, 'status 3'),
        # and the culprit before those who suffer.
        (
            [],
            {
                0: [outcome(0, 'peer-lost', 'n-a', error=PEER)],
                1: [result(1, 'n-b', killed='was stopped')],
            },
            Ending.PREEMPTED,
            r'^rank 1 on n-b was stopped; its output is in /logs/rank-1\.log$',
        ),
        (
            [],
            {0: [outcome(0, 'peer-lost', 'n-a', error=PEER)], 1: []},
            Ending.PREEMPTED,
            r'^rank 0 on n-a lost touch with another rank: Connection closed by peer ',
        ),
        (
            [],
            {
                0: [result(0, 'n-a', status=-6)],
                1: [result(1, 'n-b', status=-9), result(2, 'n-b', status=1)],
            },
            Ending.PREEMPTED,
            '^rank 1 on n-b was ended by SIGKILL',
        ),
    ],
)
def test_how_it_ended_and_through_whom(
    lost: list[str], settled: dict[int, list[RankResult]], ending: Ending | str, says: str
) -> None:
    fragment = running_fragment()
    fragment.note(Checkpoint('cnn', '/c/3', 300, 7, {'loss': 0.5}))
    for one in lost:
        node, _, memory = one.partition(' ')
        fragment.lose({node})
        if memory:
            fragment.job_out_of_memory(node)
            fragment.job_out_of_memory('of another fragment')
    fragment.settled = dict(settled)
    verdict = fragment.result()
    assert verdict.ending is (Ending.FAILED if ending == 'memory' else ending)
    assert verdict.out_of_memory is (ending == 'memory')
    assert verdict.checkpoint.samples == 300
    assert re.search(says, verdict.error), verdict.error
    if verdict.exception is not None:
        assert re.search(says, verdict.exception().__notes__[1])


def test_the_users_exception_comes_back_with_its_traceback_fragment_and_log() -> None:
    fragment = running_fragment()
    fragment.settled = {
        0: [outcome(0, 'peer-lost', samples=10)],
        1: [outcome(1, 'error', samples=10, error=user_error(KeyError('lr')))],
    }
    verdict = fragment.result()
    assert verdict.ending is Ending.FAILED
    assert verdict.exception is not None
    raised = verdict.exception()
    assert isinstance(raised, KeyError) and raised.__traceback__ is not None
    [note] = raised.__notes__
    assert 'fragment 7' in note
    assert '/logs/rank-1.log' in note
    assert 'Traceback of the node' in note
    error = msg.RankError('Odd', 'only here', 'Traceback of the node')  # it cannot be loaded
    fragment.settled[1] = [outcome(1, 'error', samples=10, error=error)]
    load = fragment.result().exception
    assert load is not None and 'Odd: only here' in str(load())


def test_which_ends_may_be_for_lack_of_memory() -> None:
    worker = msg.RankError(
        'RuntimeError', 'DataLoader worker (pid 7) is killed by signal: Killed. ', ''
    )
    for one, status, may in (
        (result(1), -9, True),
        (result(1), 1, False),
        (result(1, killed='was stopped'), -9, False),
        (outcome(1, 'error', error=worker), 1, True),
        (outcome(1, 'peer-lost'), 1, False),
    ):
        assert one.may_lack_memory(status) is may


def test_a_node_that_never_says_anything_is_lost_when_its_fragment_was_given_up() -> None:
    """Nobody knows whether it will: its manager may live, and have no worker any more."""
    fragment, watchdog = running_fragment(2), Watchdog(Timeouts())
    fragment.sent_at, fragment.contact.heard[1] = fragment.decided_at, fragment.decided_at + 3.0
    assert watchdog.look([fragment], 3.0) == []
    members.give_up(fragment, 'one of its ranks died')
    assert watchdog.look([fragment], 4.0) == watchdog.look([fragment], 5.0) == []
    assert watchdog.look([fragment], 6.5) == [NodeSilent('n0', 'nothing was heard from it in 6 s')]


def test_what_it_was_given_up_for_is_the_cause_and_not_the_ranks_killed_for_it() -> None:
    fragment = running_fragment(1)
    fragment.given_up.why = 'it did not stop within 2 s'
    fragment.settled = {0: [result(0, status=-9)]}
    assert fragment.result().error == 'it did not stop within 2 s'
    # But for those that died before, where the others did not notice.
    fragment = running_fragment(2)
    fragment.ended = {1: {1: 5.0}}
    members.give_up(fragment, 'some of its ranks ended in trouble and the others did not notice')
    fragment.settled = {0: [result(0, 'n-a', status=-9)], 1: [result(1, 'n-b', status=-9)]}
    assert fragment.result().error.startswith('rank 1 on n-b was ended by SIGKILL')


def test_a_rank_that_does_not_end_after_sigkill_loses_its_node() -> None:
    fragment, watchdog = running_fragment(2), Watchdog(Timeouts(hang_s=10.0))
    fragment.contact.heard = {0: 100.0, 1: 100.0}
    members.give_up(fragment, 'it did not stop within 2 s')
    fragment.settled[0] = [result(0, status=-9)]
    for second in range(100, 120):
        fragment.contact.heard[1] = float(second)  # the node itself is alive
        found = watchdog.look([fragment], float(second))
        if second <= 108:
            assert found == []
    assert [type(one) for one in found] == [NodeSilent]
    assert (found[0].node, 'SIGKILL' in found[0].why) == ('n1', True)  # type: ignore[union-attr]


def test_a_survivor_gets_time_to_finish_the_checkpoint_that_it_writes() -> None:
    for saving, given_up in ((False, 106), (True, 113)):
        fragment, watchdog = running_fragment(2), Watchdog(Timeouts(hang_s=12.0, peer_s=5.0))
        fragment.trouble_at, fragment.saving = 100.0, saving
        found = {}
        for at in range(100, given_up + 1):
            found[at] = watchdog.look([fragment], float(at))
        assert [at for at, what in found.items() if what] == [given_up]


def faulty(rank: int, node: str) -> RankResult:
    return outcome(rank, 'device-fault', node, error=user_error(RuntimeError('CUDA error: ECC')))


def test_a_broken_device_is_a_preemption_unless_it_is_so_on_three_nodes() -> None:
    fragment = running_fragment(3)
    fragment.settled = {
        0: [outcome(0, 'peer-lost')],
        1: [faulty(1, 'n-b')],
        2: [outcome(2, 'error', error=user_error(KeyError('it has lost a peer')))],
    }
    verdict = fragment.result({'CUDA error: ECC': {'n-a'}})
    assert verdict.ending is Ending.PREEMPTED
    assert 'rank 1 on n-b has a broken device: CUDA error: ECC;' in verdict.error
    assert fragment.device_faults().keys() == {'n1'}
    verdict = fragment.result({'CUDA error: ECC': {'n-a', 'n-c'}})
    assert verdict.ending is Ending.FAILED
    assert '3 nodes: n-a, n-b, n-c' in verdict.error
    assert fragment.result({'CUDA error: other': {'n-a', 'n-c'}}).ending is Ending.PREEMPTED


def test_lost_nodes_are_named_with_the_reason() -> None:
    fragment = running_fragment(3)
    fragment.contact.names = {1: 'nid007'}
    fragment.lose({'n1', 'n2'}, {'n1': 'no sign of life for 12 s'})
    assert fragment.result().error == (
        '2 of its 3 nodes were lost: nid007 (no sign of life for 12 s), n2 (its manager '
        'or its block is gone)'
    )


def test_silence_counts_only_while_somebody_listens() -> None:
    fragment = running_fragment(2)
    fragment.contact.heard = {0: 100.0, 1: 108.0}
    assert fragment.silent(111.0, 12.0) == {}
    assert fragment.silent(112.5, 12.0).keys() == {'n0'}
    fragment.nobody_listened(60.0)  # a computer that slept, or a decision that took long
    assert fragment.silent(161.0, 12.0) == {}
    fragment.settled[0] = []
    fragment.lose({'n1'})
    assert fragment.silent(1000.0, 12.0) == {}


def test_ranks_that_ended_without_their_task_coming_back_tell_of_a_manager_that_is_stuck() -> None:
    fragment = running_fragment(1)
    fragment.contact.heard, fragment.ended = {0: 100.0}, {0: {0: 101.0}}
    assert fragment.silent(112.0, 12.0) == {}
    assert 'manager' in fragment.silent(113.5, 12.0)['n0']


def whole(node: str, digest: str, samples: int) -> LeftState:
    return LeftState(Handover(((digest,),), samples), (frozenset({node}),))


def test_what_is_left_uncommitted_counts_although_the_checkpoint_is_an_older_one() -> None:
    fragment = running_fragment(2)
    fragment.checkpoint = Checkpoint('cnn', '/c/8', 800, 6)
    fragment.settled = {
        0: [outcome(0, 'stopped', samples=900, left=msg.StateLeft('d', 900, here=False))],
        1: [outcome(1, 'stopped', samples=900, left=msg.StateLeft('d', 900, here=True))],
    }
    verdict = fragment.result()
    assert (verdict.ending, verdict.checkpoint.path) == (Ending.STOPPED, '/c/8')
    assert left_states(fragment, verdict) == (whole('n1', 'd', 900),)


@pytest.mark.parametrize(
    ('sent', 'kept', 'node'),
    [
        ({'here': False}, {'here': True}, 'n1'),
        ({'here': True}, None, 'n0'),
        ({'here': False}, None, ''),
        ({'here': False}, {'here': True, 'digest': 'e'}, ''),  # what arrived is something else
        (None, {'here': True}, ''),
    ],
)
def test_what_rank_0_has_sent_is_handed_over_where_just_that_was_kept(
    sent: dict[str, Any] | None, kept: dict[str, Any] | None, node: str
) -> None:
    fragment = running_fragment(2)
    there, here = [
        None if left is None else msg.StateLeft(**{'digest': 'd', 'samples': 900, **left})
        for left in (kept, sent)
    ]
    fragment.settled = {
        1: [outcome(1, 'stopped', path=None, samples=900, left=there)],
        0: [outcome(0, 'stopped', path=None, samples=900, left=here)],
    }
    left = left_states(fragment, fragment.result())
    assert left == ((whole(node, 'd', 900),) if node else ())
    fragment.settled[0] = [outcome(0, 'stopped', path='/c/9', samples=900, left=here)]
    assert left_states(fragment, fragment.result()) == ()  # it is committed


def test_after_a_loss_the_newest_state_of_a_survivor_is_handed_over() -> None:
    fragment = running_fragment(4)
    fragment.checkpoint = Checkpoint('cnn', '/c/8', 800, 7)
    fragment.metrics = {'loss': 0.5}
    survivors = {
        member: outcome(
            member, 'peer-lost', samples=samples, metrics={'skipped_steps': 1.0}, left=left
        )
        for member, samples, left in (
            (0, 900, msg.StateLeft('d', 900, here=True)),
            (1, 916, msg.StateLeft('e', 916, here=True)),
            (2, 932, None),  # in the middle of a step
        )
    }
    fragment.settled = {member: [survivor] for member, survivor in survivors.items()}
    fragment.lost = {3}

    def found() -> list[tuple[str, str, int]]:
        return [
            (min(one.nodes[0]), one.handover.parts[0][0], one.handover.samples)
            for one in left_states(fragment, fragment.result())
        ]

    assert found() == [('n1', 'e', 916), ('n0', 'd', 900)]
    assert furthest(fragment) == 932
    newest = left_states(fragment, fragment.result())[0].handover
    assert newest.metrics == {'loss': 0.5, 'skipped_steps': 1.0}
    fragment.uses_state = True  # which rank 0 alone has
    assert found() == [('n0', 'd', 900)]
    fragment.checkpoint = Checkpoint('cnn', '/c/9', 900, 7)  # there is one as new
    assert found() == []
    fragment.uses_state = False
    fragment.settled[1] = [
        outcome(1, 'peer-lost', samples=916, left=msg.StateLeft('e', 916, here=True, needs=908))
    ]
    assert found() == []  # a checkpoint that the user has asked for is not there


def test_where_nobody_survives_what_the_fragment_began_with_is_used_again() -> None:
    fragment = running_fragment(2)
    fragment.settled = {0: [result(0, status=-9)], 1: [result(1, status=-9)]}
    fragment.begins_with = whole('n0', 'd', 900)
    assert left_states(fragment, fragment.result()) == (fragment.begins_with,)


def test_parts_of_a_state_are_handed_over_if_all_are_there_and_of_the_same_step() -> None:
    """Two copies of two parts; the second node of one of them is lost."""
    fragment = running_fragment(4)
    fragment.checkpoint = Checkpoint('cnn', '/c/8', 800, 7)
    fragment.lost = {3}

    def lefts(*samples: int) -> None:
        for m, at in enumerate(samples):
            left = msg.StateLeft(f'd{m}', at, here=True, part=m % 2, parts=2)
            fragment.settled[m] = [outcome(m, 'peer-lost', left=left)]

    lefts(900, 900, 900)
    (left,) = left_states(fragment, fragment.result())
    assert left.handover == Handover((('d0', 'd2'), ('d1',)), 900)
    assert left.on({'n1', 'n2', 'n5'})
    assert not left.on({'n0', 'n2'})
    fragment.uses_state = True  # which rank 0 alone has
    (left,) = left_states(fragment, fragment.result())
    assert left.handover == Handover((('d0',), ('d1',)), 900)
    lefts(900, 884, 900)  # there is no whole state
    assert left_states(fragment, fragment.result()) == ()


Hear = Callable[[int, Any, float], None]


def listening() -> tuple[Told, Listener, RunningFragment, Hear]:
    told, fragment = Told(), running_fragment(3)
    listener = Listener(Members(told, cast(Any, None)), Stream([]))  # type: ignore[arg-type]
    record: Any = SimpleNamespace(checkpoint=None, note_handed_in=lambda _: None)

    def hear(member: int, message: Any, at: float) -> None:
        listener.heard(msg.FromMember('cnn', 7, member, message), fragment, record, at)

    return told, listener, fragment, hear


def looks(watchdog: Watchdog, fragment: RunningFragment, begin: float, end: float) -> list[Any]:
    """What a watchdog finds that looks as often as it wants to."""
    found: list[Any] = []
    while begin < end and not found:
        found = watchdog.look([fragment], begin)
        begin += watchdog.within_s([fragment])
    return found


@pytest.mark.parametrize('others_ended', [True, False])
def test_node_that_does_not_answer_when_others_lost_touch_is_lost_soon(others_ended: bool) -> None:
    told, _, fragment, hear = listening()
    watchdog = Watchdog(Timeouts(hang_s=100.0))
    for member in range(3):
        hear(member, msg.Alive(), 10.0)
    assert (watchdog.look([fragment], 10.4), watchdog.within_s([fragment])) == ([], LOOK_S)
    hear(0, msg.RankEnded(0, ok=False), 10.5)
    assert [message for _, message in told.messages] == [msg.AreYouThere()] * 3
    # Otherwise it is the answer of a rank that computes a long step.
    hear(1, msg.RankEnded(1, ok=False) if others_ended else msg.Alive(), 10.6)
    answer_s = ANSWER_S if others_ended else LONE_ANSWER_S
    assert looks(watchdog, fragment, 10.6, 10.5 + answer_s) == []
    (found,) = looks(watchdog, fragment, 10.51 + answer_s, 10.8 + answer_s)
    assert isinstance(found, NodeSilent) and found.node == 'n2'
    assert (
        found.why == f'no sign of life for {answer_s:g} s after other ranks had lost touch with it'
    )


def test_nodes_whose_connections_have_all_ended_are_lost_at_once() -> None:
    """Theirs to the executor, and those of the ranks of all others to theirs."""
    told, _, fragment, hear = listening()
    watchdog = Watchdog(Timeouts(hang_s=100.0))
    runner = FragmentRunner(told, Stream([]), None, Timeouts(), None)  # type: ignore[arg-type]
    runner.running['cnn', 7] = fragment
    for member in range(3):
        hear(member, msg.Alive(), 10.0)
    for member in (0, 1):
        assert runner.disconnected(MemberDisconnected('cnn', 7, member), 10.1)
    assert watchdog.look([fragment], 10.1) == []  # the last one still trains
    hear(2, msg.RankEnded(2, ok=False), 10.2)
    assert watchdog.within_s([fragment]) == 0.0
    found = watchdog.look([fragment], 10.2)
    assert {lost.node for lost in found if isinstance(lost, NodeSilent)} == {'n0', 'n1'}
    hear(0, msg.Alive(), 10.2)  # it has connected again
    assert [lost.node for lost in watchdog.look([fragment], 10.3)] == []  # type: ignore[union-attr]
    assert not watchdog.look([fragment], 10.4)


def test_all_connections_may_have_ended_here() -> None:
    """Then nothing is known of any node."""
    fragment = running_fragment(3)
    fragment.contact.heard = dict.fromkeys(range(3), 10.0)
    fragment.contact.disconnected = {0, 1, 2}
    assert Watchdog(Timeouts(hang_s=100.0)).look([fragment], 10.1) == []


def test_when_a_connection_ends_the_scheduler_is_asked_at_once_but_not_again_and_again() -> None:
    runner = FragmentRunner(Told(), Stream([]), None, Timeouts(), None)  # type: ignore[arg-type]
    runner.running['cnn', 7] = running_fragment(2)
    nothing: Any = None
    loop = EventLoop(
        nothing, nothing, Stream([]), LocalSite(nodes=1, poll_s=30.0), nothing, runner,
        NoParsl(), nothing,
    )  # fmt: skip
    asked = []
    for at in (100.0, 110.0, 131.0):
        loop._next_poll = 1000.0
        loop._take(MemberDisconnected('cnn', 7, 1), at)
        asked.append(loop._next_poll)
    assert asked == [100.0, 1000.0, 131.0]


@pytest.mark.parametrize(('saving', 'keeps'), [(False, False), (True, False), (False, True)])
def test_a_fragment_is_given_up_at_once_when_a_rank_died_but_a_checkpoint_is_written_first(
    saving: bool, keeps: bool
) -> None:
    """Ranks that keep their states have a while to leave them."""
    told, _, fragment, hear = listening()
    hear(2, FragmentStarted(9.0, 'cnn', 7, 0, 2, keeps=keeps), 10.0)
    if saving:
        hear(0, msg.SavingCheckpoint(), 10.0)
    hear(1, msg.RankEnded(1, ok=False, died=True), 10.0)
    if saving:
        assert not fragment.given_up.why
        hear(0, CheckpointSaved(10.0, Checkpoint('cnn', '/c', 8, 7, at=10.0)), 10.0)
    assert fragment.given_up.why == 'one of its ranks died'
    assert [message for _, message in told.messages][-1] == msg.Abandon(
        fragment.given_up.why, spare_s=5.0 if keeps else 0.0
    )
    ends = enumerate((-9, -11, -9))
    fragment.settled = {n: [result(n, f'n{n}', status=status)] for n, status in ends}
    assert 'rank 1 on n1 was ended by SIGSEGV' in fragment.result().error


def test_ranks_wait_for_each_other_only_if_all_say_so() -> None:
    _, _, fragment, hear = listening()
    watchdog = Watchdog(Timeouts())
    hear(0, msg.Stuck(0, 'gather'), 20.0)
    hear(1, msg.Stuck(1, 'gather'), 20.0)
    assert watchdog.look([fragment], 20.0) == []
    hear(2, msg.Stuck(2, 'receive'), 41.0)  # the others have not said so for a while
    assert watchdog.look([fragment], 41.0) == []
    hear(0, msg.Stuck(0, 'gather'), 41.5)
    hear(1, msg.Stuck(1, 'gather'), 41.5)
    (found,) = watchdog.look([fragment], 42.0)
    assert isinstance(found, GiveUp)
    assert 'rank 0 in gather, rank 1 in gather, rank 2 in receive' in found.why
    hear(0, FragmentProgressed(42.0, 'cnn', 7, 8, 1.0), 42.0)
    assert watchdog.look([fragment], 42.0) == []
