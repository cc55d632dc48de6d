"""All messages between our processes, as JSON: one class per kind, one union per channel."""

import json
import logging
import re
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.events import Count, Metrics, Seconds

ProcessId = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Status = Annotated[int, Meta(ge=-128, le=255)]  # an exit status, or minus the signal


def _kind(class_name: str) -> str:
    return re.sub(r'(?<!^)(?=[A-Z])', '-', class_name).lower()


class Message(msgspec.Struct, frozen=True, tag_field='kind', tag=_kind):
    """Base of all messages."""


# ---- rank -> member of the fragment on its node ----


class RankPid(Message, frozen=True):
    """``Launch``'s answer. ``has_payload``: a standby rank was used, which has the function."""

    pid: ProcessId
    has_payload: bool = False


class Waiting(Message, frozen=True):
    """A standby rank has reached the point where it needs its fragment."""


class Rendezvous(Message, frozen=True):
    """Where rank 0 meets the other ranks; ``secret`` authenticates what they tell each other."""

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: str


class SavingCheckpoint(Message, frozen=True):
    """Rank 0 begins to write a checkpoint."""


class Stuck(Message, frozen=True):
    """A rank has waited in one exchange for much longer than a step takes; sent repeatedly."""

    rank: Count
    exchange: str


class StateUsed(Message, frozen=True):
    """Rank 0 has used ``ctx.state``, which the other ranks may not have."""


class LeavingState(Message, frozen=True):
    """A rank has lost another one, and leaves its state in memory within :data:`LEAVING_S`."""


class RankError(msgspec.Struct, frozen=True):
    """The exception in texts and pickled; ``final``: another try would end in it, too."""

    type: str
    message: str
    traceback: str
    exception: bytes | None = None
    final: bool = False


class StateLeft(msgspec.Struct, frozen=True):
    """A state in memory, ``here`` or on another node; ``needs``: the checkpoint before it, or 0."""

    digest: str
    samples: Count
    here: bool
    needs: Count = 0
    part: Count = 0
    parts: Annotated[int, Meta(ge=1)] = 1


LEAVING_S = 10.0

RankEnd = Literal['finished', 'stopped', 'fenced', 'peer-lost', 'device-fault', 'storage', 'error']


class Outcome(Message, frozen=True):
    #: How it ended. 'finished' implies a committed state; 'stopped' too if there is a ``path``.
    how: RankEnd
    samples: Count = 0  #: number of samples that this rank knows of
    #: Rank 0's last checkpoint; None: none, or it left a newer state to be committed.
    path: str | None = None
    metrics: Metrics = {}  #: the user's last reported metrics
    #: The exception of the user's function, or the fault of a device, if any.
    error: RankError | None = None
    idle_s: Seconds | None = None  #: seconds since the end of the last step; None: there was none
    #: step_s, checkpoint_s: of the longest of the last steps, and of checkpoints; 0: unknown.
    step_s: Seconds = 0.0
    checkpoint_s: Seconds = 0.0
    #: The state that is left in memory for the next fragment; None: there is none.
    left: StateLeft | None = None
    #: What the user's function returned, as JSON; empty: nothing, or it has not returned.
    result: str = ''
    memory: Count = 0  #: the most memory that the rank has needed, in bytes; 0: unknown
    handed_in: str = ''  #: of that checkpoint


class Exit(Message, frozen=True):
    status: Status


_Events = (
    ev.TotalKnown | ev.RoundKnown | ev.FragmentStarted | ev.FragmentProgressed | ev.CheckpointSaved
)
_PassedOn = _Events | Rendezvous | SavingCheckpoint | Stuck | StateUsed
FromRank = _PassedOn | RankPid | Waiting | LeavingState | Outcome | Exit


# ---- member -> rank ----


class StopTraining(Message, frozen=True):
    """Save and end; ``node_leaves``: keep none here; ``followed``: the next one can write it."""

    why: str
    node_leaves: bool = False
    followed: bool = False


class NodeStays(Message, frozen=True):
    """The trainer is expected to continue on this node."""


class NodeEnds(Message, frozen=True):
    """When the nodes are taken away, in seconds of ``time.monotonic()`` of this one."""

    deadline: Seconds


ToRank = Rendezvous | StopTraining | NodeStays | NodeEnds


# ---- member -> executor ----


class Hello(Message, frozen=True):
    """A member has started on ``node``, with its ``clock`` in seconds since the epoch."""

    node: str
    clock: Seconds = 0.0


class Alive(Message, frozen=True):
    """A member's regular sign of life."""


class Notice(Message, frozen=True):
    """The scheduler has sent the node a signal. Its first process also sends this to members."""

    signal: str


class Leave(Message, frozen=True):
    """To a node's first process: what ran on the node has returned, so that the node can end."""


class RankEnded(Message, frozen=True):
    """A rank has ended; ``ok``: it finished, or stopped as requested; ``died``: without a word."""

    rank: Count
    ok: bool
    died: bool = False


class StandbyReady(Message, frozen=True):
    """All standby ranks of the node wait for their fragment, or none could be started."""


MemberMessage = _PassedOn | Hello | Alive | Notice | RankEnded | StandbyReady


class FromMember(msgspec.Struct, frozen=True):
    """A member's message, with the trainer, fragment and member."""

    trainer: str
    fragment: Count
    member: Count
    message: MemberMessage

    @property
    def sender(self) -> tuple[str, int, int]:
        return self.trainer, self.fragment, self.member


# ---- executor -> member ----


class Abandon(Message, frozen=True):
    """Kill the ranks, after ``spare_s`` seconds in which they may leave their state in memory."""

    why: str
    spare_s: Seconds = 0.0


class AreYouThere(Message, frozen=True):
    """Answer :class:`Alive` at once: other ranks have lost touch with somebody."""


class StartStandby(Message, frozen=True):
    """For the next fragment, for ``wait_s`` seconds; ``rescale``: soon, so say when they wait."""

    wait_s: Seconds
    rescale: bool = True


class TimeLeft(Message, frozen=True):
    """``Hello``'s answer: the nodes are taken in so many seconds; the order may have waited."""

    left_s: Seconds


ToMember = Rendezvous | StopTraining | Abandon | AreYouThere | StartStandby | TimeLeft


log = logging.getLogger(__name__)

_KINDS_LOGGED = 10  # per decoder, so that a sender cannot fill the log by inventing kinds
_KIND_CHARACTERS = 40

T = TypeVar('T')


def encode(message: Struct) -> bytes:
    """By Python's ``json``: msgspec refuses metrics that are not finite and names beyond UTF-8."""
    return json.dumps(msgspec.to_builtins(message, enc_hook=_as_float)).encode()


def _as_float(value: Any) -> float:
    if isinstance(value, float):  # numpy's float64, for instance
        return float(value)
    raise TypeError(f'{value!r} cannot be part of a message.')


class Decoder(Generic[T]):
    """Reads the messages of a channel: of the union ``kinds``. ``sender`` is named in the log."""

    def __init__(self, kinds: object, sender: str) -> None:
        self._kinds: Any = kinds
        self._sender = sender
        self._logged: set[str] = set()

    def decode(self, data: bytes) -> T | None:
        """None if it is not an expected message, which is logged once per kind."""
        document: object = None
        try:
            document = json.loads(data)
            message: T = msgspec.convert(document, self._kinds, str_keys=True)
        except Exception as error:  # no bytes may end their reader
            self._log_unknown(document, error)
            return None
        return message

    def _log_unknown(self, document: object, error: Exception) -> None:
        if isinstance(document, dict) and isinstance(document.get('message'), dict):
            document = document['message']
        found = document.get('kind') if isinstance(document, dict) else None
        kind = ascii(found)[:_KIND_CHARACTERS]
        if kind in self._logged or len(self._logged) >= _KINDS_LOGGED:
            return
        self._logged.add(kind)
        log.warning(
            f'A message from {self._sender} was dropped (kind {kind}): {ascii(str(error))[:200]}; '
            'others of this kind are dropped without a word'
        )
