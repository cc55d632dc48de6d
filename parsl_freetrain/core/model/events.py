"""Every fact of a run, one class from where it is seen to where it is read; and actions.

Each carries ``at``, when it was seen, by the run's one clock. Node names are unique within a run.
"""

import zlib
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, Struct, msgpack

from parsl_freetrain.core.model import types

Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]  # also since the epoch; refuses infinities
Rate = Annotated[float, Meta(ge=0.0, le=1e15)]
Metrics = Mapping[str, float]  # metrics reported by the user; they need not be finite
OUT_OF_MEMORY = 'out of memory'


class Ending(StrEnum):
    FINISHED = 'finished'  # the trainer's total is reached
    STOPPED = 'stopped'  # at a step boundary, with a checkpoint, on request or at its deadline
    PREEMPTED = 'preempted'  # nodes or ranks were taken before it had stopped by itself
    FAILED = 'failed'  # the user's code raised


class Event(Struct, frozen=True, tag_field='kind', tag=True):
    """Something that happened at ``at``."""

    at: float


class HolesSeen(Event, frozen=True):
    """What the site offers beyond the blocks that are open already."""

    holes: tuple[types.Hole, ...]


class BlockOpened(Event, frozen=True):
    """A block was submitted as job ``job_id``, or adopted, after the controller's ``request``."""

    block: str
    request: types.BlockRequest
    job_id: str = ''


class BlockRefused(Event, frozen=True):
    """The site refused a block; the next one is submitted ``next_try_s`` seconds later."""

    nodes: int
    next_try_s: float
    error: str


class BlockStarted(Event, frozen=True):
    """A block has got its nodes, at ``since_s`` at the earliest."""

    block: str
    since_s: float


class NodesJoined(Event, frozen=True):
    """Nodes of a block are ready for fragments."""

    block: str
    nodes: tuple[str, ...]
    until_s: float | None = None  # when the block ends; None: unknown
    node_class: str = ''  # their kind
    hosts: tuple[str, ...] = ()  # that they are on; empty: of their own names
    devices: tuple[int, ...] = ()  # the number of accelerators of each, where that is known


class NodeUnusable(Event, frozen=True):
    """A node's first task failed, or a device of it is broken."""

    block: str
    node: str
    error: str


class BlockEndKnown(Event, frozen=True):
    """The end of a block became known or moved (a notice, an administrator)."""

    block: str
    until_s: float | None


class NodesNeeded(Event, frozen=True):
    """Waiting jobs of others would start on these nodes of ours, some of which have not joined."""

    demands: tuple[types.NodeDemand, ...]
    blocks: tuple[types.BlockNodes, ...]


class NodesLeft(Event, frozen=True):
    """Nodes are gone: 'lost' while their block continues, or as in :class:`BlockClosed`."""

    nodes: tuple[str, ...]
    how: str = 'lost'


class BlockRequeued(Event, frozen=True):
    """A block waits for nodes again; the ones that it had have left."""

    block: str


class BlockClosed(Event, frozen=True):
    """``how``: 'taken', 'expired', 'returned', 'cancelled' or :data:`OUT_OF_MEMORY`."""

    block: str
    how: str = 'returned'


class OffersSeen(Event, frozen=True):
    """What the site has offered: spells that have begun or ended since the last such event."""

    offers: tuple[types.NodeOffer, ...] = ()


class TrainerSubmitted(Event, frozen=True):
    """A trainer waits for nodes."""

    trainer: types.Trainer
    samples: int = 0  # trained already, where it is resumed
    fragments: int = 0  # run already
    mode: str = ''
    total_epochs: float | None = None  # where it is measured in them


class TotalKnown(Event, frozen=True):
    """A trainer that is measured in epochs has seen its data: its total in samples."""

    at: Seconds
    trainer: str
    total_samples: Count


class RoundKnown(Event, frozen=True):
    """A replica has seen how many samples a round of its training has."""

    at: Seconds
    trainer: str
    round_samples: Count
    made_by: Count | None = None  # the replica that made the weights of the round that it begins


class ReplicaReached(Event, frozen=True):
    """A replica of a training, in another executor, is so far; ``samples`` None: it has ended."""

    at: Seconds
    trainer: str
    training: str
    samples: Count | None


class FragmentLaunched(Event, frozen=True):
    """A fragment was submitted to Parsl."""

    trainer: str
    fragment: int
    nodes: tuple[str, ...]  # the first has rank 0
    deadline_s: float | None
    samples: int  # where it goes on from
    shape: int = 0
    task: int | None = None  # Parsl's id of it; None: that failed
    failed: bool = False


class FragmentStarted(Event, frozen=True):
    """A rank's first step; rank 0's is recorded. ``keeps``: after a loss it leaves its state."""

    at: Seconds
    trainer: str
    fragment: Count
    samples: Count
    rank: Count = 0
    keeps: bool = False


class FragmentProgressed(Event, frozen=True):
    """``samples`` in total; ``rate`` per second since the first step, None if unknown."""

    at: Seconds
    trainer: str
    fragment: Count
    samples: Count
    rate: Rate | None = None
    metrics: Metrics = {}


class CheckpointSaved(Event, frozen=True):
    at: Seconds
    checkpoint: types.Checkpoint


class Rescaled(Event, frozen=True):
    """A trainer goes on with ``after`` nodes for ``before``, after ``seconds`` without a step."""

    trainer: str
    fragment: int
    before: int
    after: int
    seconds: float


class FragmentEnded(Event, frozen=True):
    """All members of a fragment are over, its nodes are free. Times in seconds; None: had none."""

    trainer: str
    fragment: int
    samples: int  # where the next one can go on from, by the checkpoint or in memory
    ending: Ending
    error: str = ''
    out_of_memory: bool = False  # it failed because a rank had too little memory
    committed: int | None = None  # of the last checkpoint; None: as samples
    reached: int | None = None  # the most trained; None: as samples
    start_s: float | None = None  # from the decision to its first step
    step_s: float | None = None  # a global batch
    checkpoint_s: float | None = None
    memory: int = 0  # the most that a rank needed, in bytes; 0: unknown
    final: bool = False  # it failed, and would fail again
    storage: bool = False  # a file system was in trouble, which may pass


class TrainerCancelled(Event, frozen=True):
    trainer: str


class TrainerAborted(Event, frozen=True):
    """A trainer cannot go on, whatever nodes it gets; ``why`` says of what it fails."""

    trainer: str
    why: str


class TrainerInterrupted(Event, frozen=True):
    """The run ends before the trainer; ``why`` is a sentence that says how to continue."""

    trainer: str
    why: str


class OrdinaryWork(Event, frozen=True):
    """Number of ordinary Parsl tasks that wait or run; while there are any, a block stays open."""

    outstanding: int


class Tick(Event, frozen=True):
    """Time passed; nothing else happened."""


class ShutdownRequested(Event, frozen=True):
    """Stop every fragment with a checkpoint and start nothing more."""


class RunBegan(Event, frozen=True):
    """A run begins, or is resumed: Parsl's id of it, who runs it where, and how it decides."""

    name: str
    parsl_run_dir: str = ''
    command: str = ''
    host: str = ''
    pid: int = 0
    started: float = 0.0  # the process, in seconds since the epoch; 0: unknown
    folder: str = ''
    checkpoint_dir: str = ''
    settings: dict[str, Any] = {}  # DecisionSettings as plain values; empty: no replay


class RunEnded(Event, frozen=True):
    """The run has ended: 'shutdown', or 'error' if the event loop broke down."""

    how: str


class OpenBlock(Struct, frozen=True, tag_field='kind', tag=True):
    request: types.BlockRequest


class CloseBlock(Struct, frozen=True, tag_field='kind', tag=True):
    block: str
    why: str


class ReleaseNodes(Struct, frozen=True, tag_field='kind', tag=True):
    """Give some nodes of a block back; the block goes on with the others."""

    block: str
    nodes: tuple[str, ...]
    why: str


class StartFragment(Struct, frozen=True, tag_field='kind', tag=True):
    trainer: str
    fragment: int
    nodes: tuple[str, ...]
    deadline_s: float | None  # when the first of the nodes goes; None: unknown
    samples: int
    shape: int = 0  # its place among the trainer's shapes of this node count
    exempt_until_s: float | None = None  # nothing preempts it before; None: something may
    speeds: tuple[float, ...] = ()  # relative, of nodes by which batches are divided; empty: alike
    interruptions_per_s: float | None = None  # how often nodes are taken; None: habits not known


class StopFragment(Struct, frozen=True, tag_field='kind', tag=True, eq=False):
    """Ask a fragment to write a checkpoint at its next step boundary and stop."""

    trainer: str
    fragment: int
    why: str
    then: tuple[str, ...] = ()  # where it goes on at once, if known: those that stay, free ones
    leaving: tuple[str, ...] = ()  # of its nodes, given back: no state is left in their memory

    def __eq__(self, other: object) -> bool:
        """Whether it stops the same fragment for the same reason."""
        return isinstance(other, StopFragment) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, int, str]:
        return self.trainer, self.fragment, self.why


class AbandonFragment(Struct, frozen=True, tag_field='kind', tag=True):
    """Some of the fragment's nodes are gone: end what is left at once, there is nothing to save."""

    trainer: str
    fragment: int


class EndTrainer(Struct, frozen=True, tag_field='kind', tag=True):
    """The trainer is over: 'finished', 'failed' (``why`` says of what) or 'cancelled'."""

    trainer: str
    state: str
    why: str = ''


_OnTrainers = StartFragment | StopFragment | AbandonFragment | EndTrainer
Action = OpenBlock | CloseBlock | ReleaseNodes | _OnTrainers


class Decided(Event, frozen=True):
    """The controller handled all events since the last of its kind, with this answer."""

    actions: tuple[Action, ...] = ()  # what is done next, in order
    trigger: str = ''  # the classes of events that led to it; empty: there was no decision
    nodes: int = 0  # to distribute
    status: str = ''
    solver: str = ''
    objective: float = 0.0
    bound: float | None = None
    staying: float = 0.0  # the objective of leaving what runs as it is
    seconds: float = 0.0
    current: dict[str, int] = {}  # nodes by trainer before
    allocation: dict[str, int] = {}  # and after
    problem: bytes = b''  # packed, see document; empty: it was not kept

    @property
    def document(self) -> dict[str, Any] | None:
        """The problem, as ``allocation.problem.problem_in`` reads it; None: it was not kept."""
        content = zlib.decompressobj().decompress(self.problem, 2**28)  # or a bomb
        return msgpack.decode(content) if content else None


def packed(document: Mapping[str, Any] | None) -> bytes:
    return b'' if document is None else zlib.compress(msgpack.encode(document))


NOTES = (
    BlockRefused, NodeUnusable, OffersSeen, FragmentLaunched, FragmentStarted, CheckpointSaved,
    TrainerInterrupted, RunBegan, RunEnded, Decided,
)  # fmt: skip
"""Events that do not concern the controller."""

AnyEvent = (
    HolesSeen | BlockOpened | BlockRefused | BlockStarted | NodesJoined | NodeUnusable
    | BlockEndKnown | NodesNeeded | NodesLeft | BlockRequeued | BlockClosed | OffersSeen
    | TrainerSubmitted | TotalKnown | RoundKnown | ReplicaReached | FragmentLaunched
    | FragmentStarted | FragmentProgressed | CheckpointSaved | Rescaled | FragmentEnded
    | TrainerCancelled | TrainerAborted | TrainerInterrupted | OrdinaryWork | Tick
    | ShutdownRequested | RunBegan | RunEnded | Decided
)  # fmt: skip
