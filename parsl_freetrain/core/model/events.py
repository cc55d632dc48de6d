"""The controller's inputs (events) and outputs (actions).

Every event carries ``at``, the time at which it was seen, in seconds of one clock per run; the
controller has no other clock. Node names are unique within a run: a node that comes back in
another block has another name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from parsl_freetrain.core.model.node_demand import BlockNodes, NodeDemand
from parsl_freetrain.core.model.types import BlockRequest, Hole, Trainer


class Ending(StrEnum):
    """How a fragment ended."""

    FINISHED = 'finished'  # the trainer's total is reached
    STOPPED = 'stopped'  # at a step boundary, with a checkpoint, on request or at its deadline
    PREEMPTED = 'preempted'  # nodes or ranks were taken before it had stopped by itself
    FAILED = 'failed'  # the user's code raised


@dataclass(frozen=True)
class Event:
    at: float


@dataclass(frozen=True)
class HolesSeen(Event):
    """What the site offers beyond the blocks that are open already."""

    holes: tuple[Hole, ...]


@dataclass(frozen=True)
class BlockOpened(Event):
    """A block was submitted; ``request`` is what the controller asked for."""

    block: str
    request: BlockRequest


@dataclass(frozen=True)
class BlockStarted(Event):
    """A block has got its nodes, at ``since_s`` at the earliest."""

    block: str
    since_s: float


@dataclass(frozen=True)
class NodesJoined(Event):
    """Nodes of a block are ready for fragments; ``until_s``: when the block ends, None
    if unknown; ``node_class``: their kind; ``hosts``: the hosts that they are on, by default of
    their own names.
    """

    block: str
    nodes: tuple[str, ...]
    until_s: float | None = None
    node_class: str = ''
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockEndKnown(Event):
    """The end of a block became known or moved (a notice, an administrator)."""

    block: str
    until_s: float | None


@dataclass(frozen=True)
class NodesNeeded(Event):
    """Waiting jobs of others would start now on nodes of our blocks.

    Together they can all be served. A name in ``demands`` and ``blocks`` is that of a node which
    has joined, or of one that has not joined yet.
    """

    demands: tuple[NodeDemand, ...]
    blocks: tuple[BlockNodes, ...]


@dataclass(frozen=True)
class NodesLeft(Event):
    """Nodes are gone; fragments on them cannot go on."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class BlockRequeued(Event):
    """A block waits for nodes again; the ones that it had have left."""

    block: str


@dataclass(frozen=True)
class BlockClosed(Event):
    """A block is over, with whatever nodes it still had."""

    block: str


@dataclass(frozen=True)
class TrainerSubmitted(Event):
    trainer: Trainer
    samples: int = 0  # already trained, when resumed
    fragments: int = 0  # already run, when resumed


@dataclass(frozen=True)
class TotalKnown(Event):
    """A trainer that is measured in epochs has seen its data: its total in samples."""

    trainer: str
    total_samples: int


@dataclass(frozen=True)
class FragmentProgressed(Event):
    """``samples`` trained in total; ``rate`` in samples per second since the fragment's first step,
    None if unknown.
    """

    trainer: str
    fragment: int
    samples: int
    rate: float | None = None


@dataclass(frozen=True)
class Rescaled(Event):
    """A trainer goes on with ``after`` nodes in place of ``before``; for ``seconds`` no step was
    trained.
    """

    trainer: str
    fragment: int
    before: int
    after: int
    seconds: float


@dataclass(frozen=True)
class FragmentTimed(Event):
    """What a fragment took, in seconds: from the decision to its first step, a global batch, a
    checkpoint; None: it had none. ``memory``: the most memory that a rank needed, in bytes; 0:
    unknown.
    """

    trainer: str
    fragment: int
    start_s: float | None
    step_s: float | None
    checkpoint_s: float | None
    memory: int = 0


@dataclass(frozen=True)
class FragmentEnded(Event):
    """All members of a fragment are over, its nodes are free; ``samples`` is the last
    checkpoint's. ``out_of_memory``: it failed because a rank had too little memory.
    """

    trainer: str
    fragment: int
    samples: int
    ending: Ending
    error: str = ''
    out_of_memory: bool = False


@dataclass(frozen=True)
class TrainerCancelled(Event):
    trainer: str


@dataclass(frozen=True)
class TrainerAborted(Event):
    """A trainer cannot go on, whatever nodes it gets; ``why`` says of what it fails."""

    trainer: str
    why: str


@dataclass(frozen=True)
class OrdinaryWork(Event):
    """Number of ordinary Parsl tasks that wait or run; while there are any, a block stays open."""

    outstanding: int


@dataclass(frozen=True)
class Tick(Event):
    """Time passed; nothing else happened."""


@dataclass(frozen=True)
class ShutdownRequested(Event):
    """Stop every fragment with a checkpoint and start nothing more."""


@dataclass(frozen=True)
class OpenBlock:
    request: BlockRequest


@dataclass(frozen=True)
class CloseBlock:
    block: str
    why: str


@dataclass(frozen=True)
class ReleaseNodes:
    """Give some nodes of a block back; the block goes on with the others."""

    block: str
    nodes: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class StartFragment:
    """Start a fragment of ``trainer`` on ``nodes``; ``deadline_s``: when the first of them goes,
    None if unknown; ``shape``: its place among the trainer's shapes of this node count;
    ``exempt_until_s``: nothing preempts it before, None if something may; ``speeds``: how fast each
    node is, relative to the others, where each batch is divided by it; empty: they are alike;
    ``interruptions_per_s``: how often to expect that its nodes are taken, None if habits of nodes
    are not known.
    """

    trainer: str
    fragment: int
    nodes: tuple[str, ...]
    deadline_s: float | None
    samples: int
    shape: int = 0
    exempt_until_s: float | None = None
    speeds: tuple[float, ...] = ()
    interruptions_per_s: float | None = None


@dataclass(frozen=True)
class StopFragment:
    """Ask a fragment to write a checkpoint at its next step boundary and stop.

    ``then``: nodes on which the trainer is expected to go on at once, as far as they are known: its
    own that stay, and free ones. ``leaving``: those of its nodes that are given back, so that no
    state is left in their memory.
    """

    trainer: str
    fragment: int
    why: str
    then: tuple[str, ...] = field(default=(), compare=False)
    leaving: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class AbandonFragment:
    """Some of the fragment's nodes are gone: end what is left of it at once, there is nothing to
    save.
    """

    trainer: str
    fragment: int


@dataclass(frozen=True)
class EndTrainer:
    """The trainer is over: 'finished', 'failed' (``why`` says of what) or 'cancelled'."""

    trainer: str
    state: str
    why: str = ''


Action = (
    OpenBlock
    | CloseBlock
    | ReleaseNodes
    | StartFragment
    | StopFragment
    | AbandonFragment
    | EndTrainer
)
