"""What the controller knows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from parsl_freetrain.core.allocation import Answer
from parsl_freetrain.core.assignment import FreeNode
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.events import Action
from parsl_freetrain.core.profile import Profile
from parsl_freetrain.core.words import BlockRequest, Trainer


@dataclass(frozen=True)
class ControllerSettings:
    """How decisions are made.

    Attributes
    ----------
    horizon_s
        How far ahead a decision looks, in seconds (the paper's T_fwd; U is flat between 60 and 300 on Summit).
    min_hole_s
        Holes and nodes with less time left, in seconds, are not used.
    max_blocks
        So many blocks are open or queued at once, at most.
    metric
        What is maximised: a name in :data:`parsl_freetrain.core.objectives.METRICS`.
    spans_blocks
        Whether a fragment may use nodes of several blocks.
    trainers_at_a_time
        Only the first so many unfinished trainers get nodes; None: all.
    retries
        How many errors of its own code a trainer survives.
    stalls
        A trainer fails when so many of its fragments in a row died without progress though no node was lost.
    idle_block_s
        A block on which nothing ran for so many seconds is given back.
    workers_per_node
        Ordinary Parsl tasks that one node runs at once.

    Raises
    ------
    BadInput
        If a number cannot be meant.
    """

    horizon_s: float = 120.0
    min_hole_s: float = 5.0
    max_blocks: int = 32
    metric: str = 'throughput'
    spans_blocks: bool = True
    trainers_at_a_time: int | None = None
    retries: int = 0
    stalls: int = 5
    idle_block_s: float = 30.0
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.horizon_s < math.inf:
            raise BadInput(f'The horizon horizon_s is {self.horizon_s}; it must be a number of seconds above 0.')
        for name, least in (('min_hole_s', 0), ('idle_block_s', 0), ('max_blocks', 1), ('retries', 0), ('stalls', 1),
                            ('workers_per_node', 1), ('trainers_at_a_time', 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise BadInput(f'The setting {name} is {value}; it must be at least {least}.')


@dataclass
class FragmentState:
    """A fragment that has not ended."""

    number: int
    nodes: tuple[str, ...]
    deadline_s: float | None
    from_samples: int
    stopping: bool = False   # asked to stop at a step boundary
    broken: bool = False     # some of its nodes are gone

    def ending(self, at: float, lead_s: float) -> bool:
        """Whether it will end without being asked: its nodes are as good as free."""
        return self.stopping or self.broken or (self.deadline_s is not None and self.deadline_s - at < lead_s)


@dataclass
class TrainerState:
    """A trainer that has not ended."""

    trainer: Trainer
    samples: int
    fragments: int
    profile: Profile
    running: FragmentState | None = None
    errors: int = 0
    stalled: int = 0
    cancelled: bool = False

    def wanted_nodes(self) -> int:
        """How many nodes it could make use of at once."""
        return self.profile.best_count(self.trainer.min_nodes, self.trainer.max_nodes)


@dataclass
class BlockState:
    """A block that has not closed."""

    request: BlockRequest
    until_s: float | None = None
    nodes: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)   # every node that ever joined
    idle_since: float | None = None


@dataclass
class ControllerState:
    """Everything that has not ended, in order of submission where order matters."""

    trainers: dict[str, TrainerState] = field(default_factory=dict)
    blocks: dict[str, BlockState] = field(default_factory=dict)
    nodes: dict[str, FreeNode] = field(default_factory=dict)   # every node there is, busy or not
    closed: set[str] = field(default_factory=set)              # blocks that are over: what is heard of them comes late
    ordinary: int = 0
    shutting_down: bool = False

    def busy(self) -> set[str]:
        """Nodes that a fragment still holds."""
        return {n for t in self.trainers.values() if t.running for n in t.running.nodes}

    def bidders(self, settings: ControllerSettings) -> list[TrainerState]:
        """The trainers whose turn it is, first submitted first."""
        return [t for t in self.trainers.values() if not t.cancelled][:settings.trainers_at_a_time]


@dataclass(frozen=True)
class Decision:
    """What was seen, what was decided, and what it is expected to be worth.

    Attributes
    ----------
    nodes
        Nodes to give away.
    current, answer
        Nodes by trainer before, and the allocator's answer.
    staying
        The objective of keeping what runs, in the unit of ``answer.objective``.
    actions
        What follows at once; fragments that have to wait for nodes follow at later events.
    """

    at: float
    trigger: str
    nodes: int
    current: dict[str, int]
    staying: float
    answer: Answer
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Reply:
    """The controller's answer to an event."""

    actions: tuple[Action, ...] = ()
    decision: Decision | None = None
