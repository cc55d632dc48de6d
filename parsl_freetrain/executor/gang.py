"""A fragment in the executor's eyes: its members, what they said, and what that adds up to. No effects."""

from __future__ import annotations

import base64
import signal
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import tblib
from parsl.app.errors import RemoteExceptionWrapper

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.core.events import Ending, StartFragment
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.training.fragment import Handover


@dataclass(frozen=True)
class Verdict:
    """How a fragment ended.

    Attributes
    ----------
    ending
        For the controller.
    checkpoint
        The newest one that is known to be committed; what the fragment's AppFuture resolves to.
    error
        A sentence; empty if nothing went wrong.
    exception
        The user's exception, where there is one.
    """

    ending: Ending
    checkpoint: Checkpoint
    error: str = ''
    exception: BaseException | None = None


@dataclass
class Gang:
    """The members of one fragment.

    ``outer`` is what Parsl waits for; a member is *settled* when its task has come back or its node is lost.
    """

    action: StartFragment
    decided_at: float
    checkpoint: Checkpoint
    outer: Future[Checkpoint] | None = None
    started_at: float | None = None
    ranks_per_node: int = 1
    reached: int = 0
    stop: str = ''              # why it was asked to stop
    stop_at: float = 0.0
    grace_s: float | None = None    # until it is killed after a request to stop; None: the usual patience
    abandoned: str = ''         # why it was given up
    task: bytes = b''           # what its members run
    awaited: set[int] = field(default_factory=set)   # members whose ranks of the next fragment it is kept training for
    goes_on: bool = False       # the trainer is expected to go on at once when it has stopped
    begins_with: Handover | None = None     # the state that it finds in memory
    trouble_at: float | None = None
    stepped_at: float | None = None     # when rank 0 last told of a step or a checkpoint
    rendezvous: dict[str, Any] | None = None
    heard: dict[int, float] = field(default_factory=dict)       # member -> when it was last heard of
    names: dict[int, str] = field(default_factory=dict)         # member -> what people call its node
    ended: dict[int, dict[int, float]] = field(default_factory=dict)   # member -> its ranks that have ended, and when
    settled: dict[int, list[dict[str, Any]] | BaseException] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    lost_why: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.action.trainer

    @property
    def number(self) -> int:
        return self.action.fragment

    @property
    def members(self) -> range:
        return range(len(self.action.nodes))

    def over(self) -> bool:
        """Whether nothing more can come."""
        return all(m in self.settled or m in self.lost for m in self.members)

    def lose(self, nodes: set[str], why: Mapping[str, str] | None = None) -> None:
        """These nodes are gone; their members will not come back. ``why``: by node, as far as it is known."""
        for member in self.members:
            node = self.action.nodes[member]
            if node in nodes and member not in self.lost:
                self.lost.add(member)
                if why and node in why:
                    self.lost_why[member] = why[node]

    def silent(self, at: float, patience_s: float) -> dict[str, str]:
        """Nodes of which nothing is heard any more, or whose ranks have ended without their task coming back; with a reason."""
        found: dict[str, str] = {}
        for member in set(self.members) - self.settled.keys() - self.lost:
            node, ended = self.action.nodes[member], self.ended.get(member, {})
            if len(ended) == self.ranks_per_node and at - max(ended.values()) > patience_s:
                found[node] = f'its ranks ended, and its Parsl manager has not passed that on within {patience_s:g} s'
            elif len(ended) < self.ranks_per_node and at - self.heard.get(member, at) > patience_s:
                found[node] = f'no sign of life for {patience_s:g} s'
        return found

    def nobody_listened(self, seconds: float) -> None:
        """For so long the executor has not listened: what was not heard in that time means nothing."""
        self.stepped_at = None if self.stepped_at is None else self.stepped_at + seconds
        self.heard = {member: at + seconds for member, at in self.heard.items()}
        self.ended = {member: {rank: at + seconds for rank, at in ranks.items()} for member, ranks in self.ended.items()}

    def note_checkpoint(self, message: dict[str, Any]) -> Checkpoint:
        self.checkpoint = Checkpoint(self.name, message['path'], message['samples'], self.number, dict(message['metrics']))
        self.reached = max(self.reached, self.checkpoint.samples)
        return self.checkpoint

    def _outcomes(self, member: int) -> list[dict[str, Any]]:
        came = self.settled.get(member)
        return came if isinstance(came, list) else []

    def last_word(self) -> dict[str, Any]:
        """What rank 0 said at its end; empty: nothing."""
        return next((outcome for outcome in self._outcomes(0) if outcome['rank'] == 0), {})

    def handover(self, verdict: Verdict) -> tuple[str, Handover] | None:
        """A node, and the state that it has left in its memory, if that is what rank 0 has committed at its end."""
        last, sent = verdict.checkpoint, self.last_word().get('left')
        if not sent or verdict.ending is not Ending.STOPPED or (sent['samples'], self.number) != (last.samples, last.fragment):
            return None
        there = {**sent, 'here': True}
        node = next((self.action.nodes[m] for m in self.members for outcome in self._outcomes(m) if outcome.get('left') == there), None)
        return None if node is None else (node, Handover(sent['digest'], last.path, last.samples, last.fragment, last.metrics))

    def verdict(self) -> Verdict:
        """What all that the members said adds up to."""
        outcomes = [outcome for member in sorted(self.settled) for outcome in self._outcomes(member)]
        said = {o['how']: o for o in reversed(outcomes)}   # of each kind, the lowest rank's
        for how, ending in (('finished', Ending.FINISHED), ('stopped', Ending.STOPPED)):
            # Only rank 0 knows which checkpoint is the last; without its word the next fragment looks for it.
            if how in said and said[how]['rank'] == 0:
                if said[how].get('path'):
                    self.note_checkpoint(said[how])
                return Verdict(ending, self.checkpoint)
        if 'error' in said and not self.lost:
            error = said['error']
            exception = self._exception(error)
            return Verdict(Ending.FAILED, self.checkpoint, f'{error["error"]["type"]}: {error["error"]["message"]}', exception)
        return Verdict(Ending.PREEMPTED, self.checkpoint, self._cause(outcomes))

    def _cause(self, outcomes: list[dict[str, Any]]) -> str:
        """Who is to blame, from the surest sign to the vaguest."""
        if self.lost:
            named = [f'{self.names.get(m, self.action.nodes[m])} ({self.lost_why.get(m, "its manager or its block is gone")})'
                     for m in sorted(self.lost)]
            return f'{len(self.lost)} of its {len(self.members)} nodes were lost: {", ".join(named)}'
        for outcome in sorted(outcomes, key=lambda o: o['how'] != 'hung'):
            if outcome['how'] == 'hung':
                return f'{_rank(outcome)} {outcome["why"]}; its output is in {outcome["log"]}'
            # Those that it killed itself, when it was given up, are not to blame.
            if outcome['how'] == 'died' and not self.abandoned:
                return f'{_rank(outcome)} {_describe(outcome.get("status"))}; its output is in {outcome["log"]}'
        if self.abandoned:
            return self.abandoned
        for came in self.settled.values():
            if isinstance(came, BaseException):
                return f'{type(came).__name__}: {came}'
        for outcome in outcomes:
            if outcome['how'] == 'peer-lost' and outcome.get('error'):
                return f'{_rank(outcome)} lost touch with another rank: {outcome["error"]["message"]}'
        return 'its ranks lost touch with each other'

    def _exception(self, outcome: dict[str, Any]) -> BaseException:
        """The user's exception with its own traceback, and where to look."""
        error = outcome['error']
        exception: BaseException
        if error.get('exception'):
            try:
                exception, trace = cloudpickle.loads(base64.b64decode(error['exception']))
                exception = exception.with_traceback(tblib.Traceback.from_dict(trace).as_traceback())
            except Exception:  # a class that only exists on the node; its text is what matters
                exception = FreeTrainError(f'{error["type"]}: {error["message"]}')
        else:
            exception = FreeTrainError(f'{error["type"]}: {error["message"]}')
        exception.add_note(f'Raised in fragment {self.number} of trainer {self.name!r}, rank {outcome["rank"]}; '
                           f'its output is in {outcome["log"]}.\n{error["traceback"]}')
        return exception


def came_back(done: Future[Any]) -> list[dict[str, Any]] | BaseException:
    """What a member returned or raised; an app's exception comes as a result, wrapped, which otherwise the DataFlowKernel unwraps."""
    error = done.exception()
    if error is not None:
        return error
    result = done.result()
    if isinstance(result, RemoteExceptionWrapper):
        raised: BaseException = result.get_exception()
        return raised
    outcomes: list[dict[str, Any]] = result
    return outcomes


def _rank(outcome: dict[str, Any]) -> str:
    return f'rank {outcome["rank"]} on {outcome["node"]}' if outcome.get('node') else f'rank {outcome["rank"]}'


def _describe(status: int | None) -> str:
    if status is None:
        return 'died'
    if status < 0:
        return f'was ended by {signal.Signals(-status).name}'
    return f'exited with status {status}'
