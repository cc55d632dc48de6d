"""A fragment as the executor sees it: its members, and the result of their messages; pure."""

import json
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import tblib
from parsl.app.errors import RemoteExceptionWrapper

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.events import Ending, FragmentProgressed, StartFragment
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.fragment.fragment_parts import Contact, GivenUp, Stopping
from parsl_freetrain.executor.fragment.member_order import RankResult
from parsl_freetrain.training.comm.device_faults import (
    ASSERT,
    ASSERTED,
    out_of_memory,
    storage_trouble,
)
from parsl_freetrain.training.spec.fragment_order import Handover
from parsl_freetrain.training.spec.messages import Outcome, RankError, Rendezvous

FAULTY_NODES = 3  # number of nodes on which the same fault of a device is the function's

_ENDINGS = {'finished': Ending.FINISHED, 'stopped': Ending.STOPPED}

STUCK_S = 10.0  # how long a rank's report ``Stuck`` stays valid, in seconds
ANSWER_S = 0.5  # seconds for a member to answer when all ranks of the others have ended
LONE_ANSWER_S = 2.0  # seconds for a member to answer when others still run


class FragmentResult(NamedTuple):
    ending: Ending  #: for the controller
    #: The newest one that is known to be committed; what the fragment's AppFuture resolves to.
    checkpoint: Checkpoint
    error: str = ''  #: a sentence; empty if nothing went wrong
    #: Loads the user's exception, where there is one; not on the event loop: its class is theirs.
    exception: Callable[[], BaseException] | None = None
    out_of_memory: bool = False  #: whether it failed because a rank had too little memory
    final: bool = False  #: whether it would fail again
    storage: bool = False  #: whether a file system was in trouble


class LeftState(NamedTuple):
    """A state that is not committed, and of each of its parts the nodes that have it."""

    handover: Handover
    nodes: tuple[frozenset[str], ...]

    def on(self, nodes: Collection[str]) -> bool:
        return all(not part.isdisjoint(nodes) for part in self.nodes)


@dataclass
class RunningFragment:
    """The members of one fragment; *settled* ones came back or lost their node."""

    action: StartFragment
    decided_at: float
    checkpoint: Checkpoint
    outer: Future[Checkpoint] | None = None
    sent_at: float = -math.inf  # to its nodes
    started_at: float | None = None
    ranks_per_node: int = 1
    reached: int = 0
    recorded_at: float = 0.0  # when its last report was recorded
    unrecorded: FragmentProgressed | None = None  # the last report, if it was not recorded
    metrics: Mapping[str, float] = field(default_factory=dict)  # what rank 0 said last
    stopping: Stopping = field(default_factory=Stopping)
    given_up: GivenUp = field(default_factory=GivenUp)
    contact: Contact = field(default_factory=Contact)
    task: bytes = b''  # what its members run
    begins_with: LeftState | None = None  # the state that it finds in memory
    keeps: bool = False  # its ranks leave their states in memory when one of them is lost
    uses_state: bool = False  # rank 0 has used ctx.state, which only its state has
    trouble_at: float | None = None
    died: bool = False  # one of its ranks has died without a word
    saving: bool = False  # rank 0 is writing a checkpoint
    stepped_at: float | None = None  # when rank 0 last told of a step or a checkpoint
    rendezvous: Rendezvous | None = None
    # member -> its ranks that have ended, and when
    ended: dict[int, dict[int, float]] = field(default_factory=dict)
    settled: dict[int, list[RankResult] | BaseException] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    lost_why: dict[int, str] = field(default_factory=dict)
    job_short_of_memory: bool = False  # the job of a node that was lost ran out of memory

    @property
    def name(self) -> str:
        return self.action.trainer

    @property
    def number(self) -> int:
        return self.action.fragment

    @property
    def members(self) -> range:
        return range(len(self.action.nodes))

    def leaves(self, member: int) -> bool:
        """Whether a member's node is given back when the fragment has stopped."""
        return self.action.nodes[member] in self.stopping.leaving

    def over(self) -> bool:
        return all(m in self.settled or m in self.lost for m in self.members)

    def lose(self, nodes: set[str], why: Mapping[str, str] | None = None) -> None:
        """These nodes are gone, with their members. ``why``: by node, as far as it is known."""
        for member in self.members:
            node = self.action.nodes[member]
            if node in nodes and member not in self.lost:
                self.lost.add(member)
                if why and node in why:
                    self.lost_why[member] = why[node]

    def job_out_of_memory(self, node: str) -> None:
        """The job of a node has ended because it needed too much memory."""
        if node in self.action.nodes:
            self.job_short_of_memory = True
            self.lost_why[self.action.nodes.index(node)] = 'its job ran out of memory'

    def silent(self, at: float, patience_s: float) -> dict[str, str]:
        """Nodes not heard any more, or whose tasks do not come back, with a reason."""
        found: dict[str, str] = {}
        cut_off = self.cut_off()
        for member in set(self.members) - self.settled.keys() - self.lost:
            node, ended = self.action.nodes[member], self.ended.get(member, {})
            heard = self.contact.heard
            if len(ended) == self.ranks_per_node and at - max(ended.values()) > patience_s:
                found[node] = (
                    'its ranks ended, and its Parsl manager has not passed that on '
                    f'within {patience_s:g} s'
                )
            elif member in cut_off:
                found[node] = 'its connection ended, and all ranks elsewhere had lost touch with it'
            elif (
                self.contact.asked_at is not None
                and member in self.unanswered()
                and at - self.contact.asked_at > (answer_s := self._answer_s(member))
            ):
                found[node] = f'no sign of life for {answer_s:g} s after {self.contact.asked_why}'
            elif len(ended) < self.ranks_per_node and at - heard.get(member, at) > patience_s:
                found[node] = f'no sign of life for {patience_s:g} s'
            elif (seen_at := self.given_up.seen_at) is None:
                continue
            elif member in heard and at - seen_at > patience_s + self.given_up.spare_s:
                # SIGKILL ends a process only when it returns from the driver.
                found[node] = f'a rank there has not ended {patience_s:g} s after SIGKILL'
            elif member not in heard and at - max(seen_at, self.sent_at) > LONE_ANSWER_S:
                # The others wait for no worker that may never take the task; this one may still.
                found[node] = f'nothing was heard from it in {at - self.sent_at:.0f} s'
        return found

    def unanswered(self) -> set[int]:
        """Members that were asked whether they are there, and have not answered yet."""
        if self.contact.asked_at is None:
            return set()
        return {
            member
            for member, at in self.contact.heard.items()
            if at < self.contact.asked_at and member not in self.settled and member not in self.lost
        }

    def cut_off(self) -> set[int]:
        """Members whose computers have lost their connections, to here and to all other ranks."""
        gone = {member for member in self.contact.disconnected if not self.ranks_ended(member)}
        return gone if self._ended_but(gone) else set()

    def _ended_but(self, members: set[int]) -> bool:
        ended = {member for member in self.members if self.ranks_ended(member)}
        return bool(ended) and ended | members == set(self.members)

    def ranks_ended(self, member: int) -> bool:
        ended = len(self.ended.get(member, ())) == self.ranks_per_node
        return ended or member in self.settled or member in self.lost

    def _answer_s(self, member: int) -> float:
        """Seconds for a member to answer. A wrong verdict costs a greeting, never a result."""
        return ANSWER_S if self._ended_but(self.unanswered() | {member}) else LONE_ANSWER_S

    def deadlock(self, at: float) -> str:
        """Who waits in which exchange, if all ranks wait for each other; else empty."""
        stuck = self.contact.stuck.items()
        waiting = {rank: name for rank, (name, said) in stuck if at - said < STUCK_S}
        busy = len(waiting) < len(self.members) * self.ranks_per_node
        if busy or self.stopping.why or self.saving:
            return ''
        named = [f'rank {rank} in {waiting[rank]}' for rank in sorted(waiting)]
        more = f' and {len(named) - 8} more' if len(named) > 8 else ''
        return (
            f'all of its ranks waited for each other, {", ".join(named[:8])}{more}: one of them '
            'has left out an exchange; their logs show where each was'
        )

    def nobody_listened(self, seconds: float) -> None:
        """Do not count these seconds as silence: the executor did not listen."""
        self.stepped_at = None if self.stepped_at is None else self.stepped_at + seconds
        if self.contact.asked_at is not None:
            self.contact.asked_at += seconds
        if self.given_up.seen_at is not None:
            self.given_up.seen_at += seconds
        self.contact.heard = {member: at + seconds for member, at in self.contact.heard.items()}
        ends = self.ended.items()
        self.ended = {m: {rank: at + seconds for rank, at in ranks.items()} for m, ranks in ends}

    def note(self, checkpoint: Checkpoint) -> Checkpoint:
        self.checkpoint = checkpoint
        self.reached = max(self.reached, checkpoint.samples)
        return checkpoint

    def results(self, member: int) -> list[RankResult]:
        came = self.settled.get(member)
        return came if isinstance(came, list) else []

    def outcome(self) -> Outcome | None:
        return next((result.outcome for result in self.results(0) if result.rank == 0), None)

    def memory(self) -> int:
        """The most memory that one of its ranks has needed, in bytes; 0: unknown."""
        results = [result for member in self.settled for result in self.results(member)]
        return max((r.outcome.memory for r in results if r.outcome is not None), default=0)

    def device_faults(self) -> dict[str, RankResult]:
        return {
            self.action.nodes[member]: result
            for member in sorted(self.settled)
            for result in self.results(member)
            if result.how == 'device-fault'
        }

    def result(self, faults_before: Mapping[str, Collection[str]] = {}) -> FragmentResult:
        """What all members said adds up to; ``faults_before``: nodes with this device's fault."""
        # Only rank 0 knows the last checkpoint; without its word the next fragment looks for it.
        last = self.outcome()
        if last is not None and last.how in _ENDINGS:
            if last.path:
                # Without anything to train, it is the one that it began with.
                known = self.checkpoint
                if last.path != known.path:
                    known = Checkpoint(self.name, last.path, last.samples, self.number)
                    known = replace(known, handed_in=last.handed_in)
                self.note(replace(known, metrics=dict(last.metrics)))
            result = json.loads(last.result) if last.result else None
            return FragmentResult(_ENDINGS[last.how], replace(self.checkpoint, result=result))
        results = [result for member in sorted(self.settled) for result in self.results(member)]
        if faults := self.device_faults():
            return self._faulty(list(faults.values()), faults_before)
        if self.job_short_of_memory:
            return self._short_of_memory(self._cause(results))
        for result in results:
            if result.out_of_memory:
                what = 'was ended by the kernel, since memory was full'
                return self._short_of_memory(f'{result} {what}; its output is in {result.log}')
        if why := self._storage_trouble(results):
            return FragmentResult(Ending.PREEMPTED, self.checkpoint, why, storage=True)
        for result in () if self.lost else results:
            if result.outcome is not None and result.outcome.error and result.how == 'error':
                error = result.outcome.error
                sentence = f'{error.type}: {error.message}'
                if out_of_memory(error.type, error.message):
                    where = f'its output is in {result.log}'
                    return self._short_of_memory(f'{result} said {sentence}; {where}')
                notes = [ASSERTED.format(result, result.log)] if ASSERT in error.message else []
                return FragmentResult(
                    Ending.FAILED,
                    self.checkpoint,
                    notes[0] if notes else sentence,
                    partial(self._exception, result, error, *notes),
                    final=error.final,
                )
        return FragmentResult(Ending.PREEMPTED, self.checkpoint, self._cause(results))

    def _storage_trouble(self, results: list[RankResult]) -> str:
        """What a file system in trouble did to a rank or a node; empty: nothing is known."""
        for result in results:
            if result.how == 'storage':
                return f'{result} said {result.fault}; its output is in {result.log}'
        raised = [came for came in self.settled.values() if isinstance(came, BaseException)]
        return next((f'a node said {said}' for one in raised if (said := storage_trouble(one))), '')

    def _short_of_memory(self, sentence: str) -> FragmentResult:
        return FragmentResult(Ending.FAILED, self.checkpoint, sentence, out_of_memory=True)

    def _faulty(
        self, faults: list[RankResult], before: Mapping[str, Collection[str]]
    ) -> FragmentResult:
        """A broken device is a preemption. The same fault on several nodes is no coincidence."""
        for result in faults:
            assert result.outcome is not None
            assert result.outcome.error is not None
            error = result.outcome.error
            nodes = {other.node for other in faults if other.fault == error.message}
            nodes |= set(before.get(error.message, ()))
            if len(nodes) >= FAULTY_NODES:
                sentence = (
                    f'{error.message} (on {len(nodes)} nodes: {", ".join(sorted(nodes))}; so it is '
                    'an error of the function and not of a device)'
                )
                load = partial(self._exception, result, error, sentence)
                return FragmentResult(Ending.FAILED, self.checkpoint, sentence, load)
        first = faults[0]
        why = f'{first} has a broken device: {first.fault}; its output is in {first.log}'
        return FragmentResult(Ending.PREEMPTED, self.checkpoint, why)

    def _cause(self, results: list[RankResult]) -> str:
        if self.lost:
            named = [
                f'{self.contact.names.get(m, self.action.nodes[m])} '
                f'({self.lost_why.get(m, "its manager or its block is gone")})'
                for m in sorted(self.lost)
            ]
            named_lost = ', '.join(named)
            return f'{len(self.lost)} of its {len(self.members)} nodes were lost: {named_lost}'
        for result in sorted(results, key=RankResult.suffers):
            # Those that it killed itself, when it was given up, are not to blame.
            at_fault = not self.given_up.why or result.rank in self.given_up.ended_before
            if result.how == 'hung' or (result.how == 'died' and at_fault):
                what = result.killed or result.ended_how
                return f'{result} {what}; its output is in {result.log}'
        if self.given_up.why:
            return self.given_up.why
        for came in self.settled.values():
            if isinstance(came, BaseException):
                return f'{type(came).__name__}: {came}'
        for result in results:
            if result.how == 'peer-lost' and result.outcome and result.outcome.error:
                said = result.outcome.error.message.strip()
                lost = '' if result.worker_died else ' lost touch with another rank'
                return f'{result}{lost}: {said}'
        return 'its ranks lost touch with each other'

    def _exception(self, result: RankResult, error: RankError, *notes: str) -> BaseException:
        """The user's exception with its own traceback, and where to look."""
        exception: BaseException = FreeTrainError(f'{error.type}: {error.message}')
        if error.exception is not None:
            # A class that only exists on the node cannot be loaded; its text is what matters.
            with suppress(BaseException):
                raised, trace = cloudpickle.loads(error.exception)
                raised = raised.with_traceback(tblib.Traceback.from_dict(trace).as_traceback())
                if isinstance(raised, Exception):  # SystemExit would end whoever waits for it
                    exception = raised
        exception.add_note(
            f'Raised in fragment {self.number} of trainer {self.name!r}, rank {result.rank}; '
            f'its output is in {result.log}.\n{error.traceback}'
        )
        for note in notes:
            exception.add_note(note)
        return exception


def came_back(done: Future[Any]) -> list[RankResult] | BaseException:
    """What a member returned or raised. An app's exception comes wrapped (DataFlowKernel's)."""
    error = done.exception()
    if error is not None:
        return error
    result = done.result()
    if isinstance(result, RemoteExceptionWrapper):
        raised: BaseException = result.get_exception()
        return raised
    if isinstance(result, list) and all(isinstance(one, RankResult) for one in result):
        return result
    return FreeTrainError(f'a task returned a {type(result).__name__}, no list of rank results')
