"""What the controller knows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from parsl_freetrain.core.allocation import Answer, Problem
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.events import Action
from parsl_freetrain.core.limits import caps_by_owner
from parsl_freetrain.core.measured import Measured
from parsl_freetrain.core.pool import GroupKey, Pool, key_of
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
        Holes and nodes with less time left, in seconds, are not used, until it has been measured how short they may be.
    max_blocks
        So many blocks are open or queued at once, at most.
    metric
        What is maximised: whatever :func:`parsl_freetrain.core.objectives.objective_named` takes.
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
    min_rescale_s
        So many seconds pass between two rescales of a trainer, at least, unless nodes are taken from it.
    keep_free
        So many of the nodes that are there are left idle.
    max_nodes
        So many nodes are used at once, at most; None: all.
    caps
        So many nodes the trainers of one user or group may have at once: ``{'user anna': 8, 'group physics': 64}``.

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
    min_rescale_s: float = 0.0
    keep_free: int = 0
    max_nodes: int | None = None
    caps: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.horizon_s < math.inf:
            raise BadInput(f'The horizon horizon_s is {self.horizon_s}; it must be a number of seconds above 0.')
        for name, least in (('min_hole_s', 0), ('idle_block_s', 0), ('max_blocks', 1), ('retries', 0), ('stalls', 1),
                            ('workers_per_node', 1), ('trainers_at_a_time', 1), ('min_rescale_s', 0), ('keep_free', 0), ('max_nodes', 1)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise BadInput(f'The setting {name} is {value}; it must be at least {least}.')
        caps_by_owner(self.caps)


@dataclass
class FragmentState:
    """A fragment that has not ended."""

    number: int
    nodes: tuple[str, ...]
    deadline_s: float | None
    from_samples: int
    stopping: bool = False   # asked to stop at a step boundary
    broken: bool = False     # some of its nodes are gone

    def used_up(self, at: float) -> bool:
        """Whether its nodes went when they were expected to go, not before."""
        return self.broken and self.deadline_s is not None and at >= self.deadline_s - 1

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
    measured: Measured = field(default_factory=Measured)
    running: FragmentState | None = None
    former: tuple[str, ...] = ()   # the nodes of the fragment before
    errors: int = 0
    stalled: int = 0
    waiting_since: float = 0.0   # when it had no nodes last
    reached: int = 0   # samples trained so far, saved or not
    fruitless: int = 0       # fragments in a row that used up their holes and had nothing to show for it
    cancelled: bool = False
    rescaled_at: float = -math.inf   # when it was last asked to go on with another number of nodes

    def wanted_nodes(self) -> int:
        """How many nodes it could make use of at once."""
        return self.profile.best_count(self.trainer.counts())


@dataclass
class BlockState:
    """A block that has not closed."""

    request: BlockRequest
    until_s: float | None = None
    nodes: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)   # every node that ever joined
    idle_since: float | None = None


class ControllerState:
    """Everything that has not ended.

    Attributes
    ----------
    trainers
        In order of submission.
    turn
        Those whose turn it is, first submitted first: they bid for nodes.
    changed
        Trainers about whom a bid may have to be made, changed or withdrawn; whoever has done so clears it. The values say nothing.
    pool
        The nodes.
    blocks
        By name.
    closed
        Blocks that are over: what is heard of them comes late.
    ordinary
        Ordinary Parsl tasks that wait or run.
    shortest_s
        The shortest time, in seconds, for which nodes are of use to a trainer.
    longest_s
        For so many seconds nodes are of use to every one whose turn it is.
    """

    def __init__(self, trainers_at_a_time: int | None = None, min_hole_s: float = 5.0) -> None:
        self.shortest_s = self.longest_s = self._min_hole_s = min_hole_s
        self._timed = False
        self.trainers: dict[str, TrainerState] = {}
        self.turn: dict[str, TrainerState] = {}
        self.changed: dict[str, None] = {}
        self.pool = Pool()
        self.blocks: dict[str, BlockState] = {}
        self.closed: set[str] = set()
        self.ordinary = 0
        self.shutting_down = False
        self._at_a_time = math.inf if trainers_at_a_time is None else trainers_at_a_time
        self._queue: dict[str, TrainerState] = {}
        self._leaving: dict[str, TrainerState] = {}

    def timed(self) -> None:
        """Something has been measured of a trainer: note how short a hole may be.

        The shortest to two digits, since all bids are made anew when it changes.
        """
        each = [t.measured.shortest_s(self._min_hole_s) for t in self.turn.values()] or [self._min_hole_s]
        self.shortest_s, self.longest_s = float(f'{min(each):.1e}'), max(each)
        self._timed = True

    def busy(self) -> set[str]:
        """Nodes that a fragment holds."""
        return set(self.pool.holder)

    def submit(self, name: str, trainer: TrainerState) -> None:
        """A trainer is there; it is its turn if no more than the allowed number are before it."""
        self.trainers[name] = self._queue[name] = trainer
        self._admit()

    def cancel(self, name: str) -> None:
        """A trainer gets no more nodes; the next one has its turn."""
        trainer = self.trainers[name]
        trainer.cancelled = True
        self._withdraw(name)
        if trainer.running:
            self._leaving[name] = trainer

    def remove(self, name: str) -> None:
        """A trainer is over."""
        del self.trainers[name]
        self._leaving.pop(name, None)
        self._withdraw(name)

    def start(self, name: str, trainer: TrainerState, running: FragmentState) -> None:
        """A fragment starts on nodes that are free or have been taken out of their groups for it."""
        trainer.running = running
        self.pool.hold(running.nodes, name)
        self.changed[name] = None

    def end(self, name: str, trainer: TrainerState) -> FragmentState:
        """The running fragment has ended; its nodes are free."""
        ended = trainer.running
        assert ended is not None
        trainer.running, trainer.former = None, ended.nodes
        self.pool.release(ended.nodes, name)
        self.changed[name] = None
        return ended

    def stop(self, name: str, running: FragmentState) -> None:
        """The running fragment has been asked to stop."""
        running.stopping = True
        self.changed[name] = None

    def lose(self, nodes: Iterable[str]) -> dict[str, TrainerState]:
        """Nodes are gone; the trainers whose running fragments held some of them and are broken now."""
        broken: dict[str, TrainerState] = {}
        for name in nodes:
            node = self.pool.nodes.get(name)
            if node is None:
                continue
            holder = self.pool.leave(name)
            if node.block in self.blocks:
                self.blocks[node.block].nodes.discard(name)
            if holder is not None and (running := self.trainers[holder].running) and not running.broken:
                running.broken = True
                self.changed[holder] = None
                broken[holder] = self.trainers[holder]
        return broken

    def leaving(self) -> dict[GroupKey, int]:
        """How many nodes of each group cancelled trainers still hold: nobody can have them yet."""
        count: dict[GroupKey, int] = {}
        for name, trainer in self._leaving.items():
            for node in trainer.running.nodes if trainer.running else ():
                if self.pool.holder.get(node) == name:
                    key = key_of(self.pool.nodes[node])
                    count[key] = count.get(key, 0) + 1
        return count

    def _withdraw(self, name: str) -> None:
        self._queue.pop(name, None)
        if self.turn.pop(name, None):
            self.changed[name] = None
        self._admit()

    def _admit(self) -> None:
        while self._queue and len(self.turn) < self._at_a_time:
            name = next(iter(self._queue))
            self.turn[name] = self._queue.pop(name)
            self.changed[name] = None
        if self._timed:
            self.timed()


@dataclass(frozen=True)
class Decision:
    """What was seen, what was decided, and what it is expected to be worth.

    Attributes
    ----------
    trigger
        What happened, by the names of the events' classes.
    nodes
        Nodes to give away.
    current, answer
        Nodes by trainer before, and the allocator's answer.
    staying
        The objective of keeping what runs, in the unit of ``answer.objective``.
    problem
        What the allocator was asked. A plan that takes several events to be carried out is asked for once, at its beginning.
    actions
        What follows at once; fragments that have to wait for nodes follow at later events.
    """

    at: float
    trigger: str
    nodes: int
    current: dict[str, int]
    staying: float
    answer: Answer
    problem: Problem
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Reply:
    """The controller's answer to an event."""

    actions: tuple[Action, ...] = ()
    decision: Decision | None = None
