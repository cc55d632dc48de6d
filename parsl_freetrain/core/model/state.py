"""What has become of runs; times in seconds since the epoch, runs of a journal counted from 1."""

from dataclasses import dataclass, field

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint, NodeOffer, Trainer

FINAL_STATES = frozenset({'finished', 'failed', 'cancelled'})
"""States that a trainer does not leave within a run."""

PROBLEMS_KEPT = 20  # number of newest decisions of a run of which the whole problem is kept


@dataclass(slots=True)
class Block:
    run: int
    opened: ev.BlockOpened
    until: float | None = None  # its expected end; None: unknown
    begun: float | None = None  # got its nodes, at the earliest; None: it waits
    # earlier spells on nodes: (begun, queued again)
    used: list[tuple[float | None, float]] = field(default_factory=list)
    closed_at: float | None = None
    how: str | None = None  # as in BlockClosed

    @property
    def name(self) -> str:
        return self.opened.block


@dataclass(slots=True)
class Node:
    """A node's stay in one block; ``node`` is unique within the run, ``name`` is the machine's."""

    run: int
    node: str
    block: str
    name: str
    joined_at: float
    left_at: float | None = None
    how: str | None = None


@dataclass(slots=True)
class Fragment:
    """A bounded run of a trainer on some nodes. Lists are in order of time."""

    run: int
    launched: ev.FragmentLaunched
    shape: str = ''  # its name, where the trainer has shapes
    started_at: float | None = None  # its first training step
    started_samples: int | None = None
    seen: ev.FragmentProgressed | None = None  # its last report
    progress: list[ev.FragmentProgressed] = field(default_factory=list)  # all reports, where kept
    checkpoints: list[Checkpoint] = field(default_factory=list)
    ended: ev.FragmentEnded | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        return self.run, self.launched.trainer, self.launched.fragment

    @property
    def trainer(self) -> str:
        return self.launched.trainer

    @property
    def number(self) -> int:
        return self.launched.fragment

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.launched.nodes

    @property
    def ended_at(self) -> float | None:
        return None if self.ended is None else self.ended.at

    @property
    def ending(self) -> str | None:
        return None if self.ended is None else str(self.ended.ending)

    @property
    def samples(self) -> int | None:
        return None if self.ended is None else self.ended.samples

    @property
    def error(self) -> str:
        return '' if self.ended is None else self.ended.error

    @property
    def reached(self) -> int | None:
        if self.ended is None:
            return None
        return self.ended.samples if self.ended.reached is None else self.ended.reached


@dataclass(slots=True)
class Training:
    run: int
    trainer: Trainer  # with its total when that is known
    submitted: ev.TrainerSubmitted  # or resumed
    samples: int  # the last checkpoint's
    state: str  # 'queued', 'running', 'interrupted', or one of FINAL_STATES
    state_at: float  # since when
    why: str = ''  # of what it failed
    fragments: list[Fragment] = field(default_factory=list)
    rescaled: list[ev.Rescaled] = field(default_factory=list)
    resumes: int = 0  # of the last checkpoint, as there
    verified: int = 0
    weights_by: int | None = None  # the replica that made the last round's weights

    @property
    def name(self) -> str:
        return self.trainer.name

    @property
    def over(self) -> bool:
        """Whether it can get no more nodes in this run."""
        return self.state in FINAL_STATES or self.state == 'interrupted'

    @property
    def rounds(self) -> int:
        """Rounds that it has trained, as a replica of a training."""
        length = self.trainer.round_samples
        return self.samples // length if length else 0

    @property
    def rounds_needed(self) -> int:
        """Rounds that all replicas must have trained before it goes on."""
        return self.rounds - self.trainer.ahead(self.samples)

    def last(self) -> Fragment | None:
        return self.fragments[-1] if self.fragments else None


@dataclass(slots=True)
class RunState:
    id: int  # its number in the journal, from 1
    began: ev.RunBegan
    last_at: float  # when anything was noted last
    ended: ev.RunEnded | None = None
    blocks: dict[str, Block] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    trainers: dict[str, Training] = field(default_factory=dict)
    fragments: dict[tuple[str, int], Fragment] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    offers: dict[tuple[str, float], NodeOffer] = field(default_factory=dict)  # by node and start
    # those with an answer of the allocator
    decisions: list[ev.Decided] = field(default_factory=list)
    refused: list[ev.BlockRefused] = field(default_factory=list)
    unusable: list[ev.NodeUnusable] = field(default_factory=list)
    needed: ev.NodesNeeded | None = None  # what others' jobs needed last
    # by training and replica, samples of those in other executors; None: it has ended
    elsewhere: dict[str, dict[str, int | None]] = field(default_factory=dict)
    keeps_progress: bool = True  # fragments keep all reports

    def replicas(self, of: Training) -> list[Training]:
        """All of its training, in order; itself only where there are none."""
        training = of.trainer.training
        same = [one for one in self.trainers.values() if one.trainer.training == training]
        return same if training else [of]

    def rounds_elsewhere(self, of: Training) -> dict[str, int]:
        """The rounds that its training's replicas in other executors have trained."""
        length, total = of.trainer.round_samples or 0, of.trainer.total_samples or 0
        there = self.elsewhere.get(of.trainer.training, {}) if length else {}
        return {k: (total if s is None else s) // length for k, s in there.items()}

    @property
    def name(self) -> str:
        return self.began.name

    @property
    def ended_at(self) -> float | None:
        return None if self.ended is None else self.ended.at

    @property
    def how(self) -> str | None:
        return None if self.ended is None else self.ended.how


@dataclass
class History:
    """The runs of one journal. ``latest``: number of the newest, which alone may live; None: none
    does. ``damage``: sentences about unreadable places.
    """

    runs: list[RunState] = field(default_factory=list)
    latest: int | None = None
    damage: list[str] = field(default_factory=list)

    def of(self, name: str | None) -> 'History':
        """The history of one run, or all; raises BadInput if there is no run of this name."""
        if name is None:
            return self
        chosen = [run for run in self.runs if run.name == name]
        if not chosen:
            known = ', '.join(run.name for run in self.runs[-5:]) or 'none'
            raise BadInput(f'The ledger has no run {name!r}; its last runs are: {known}.')
        return History(chosen, self.latest, self.damage)

    @property
    def trainings(self) -> list[Training]:
        """All, run after run, in order of submission; as the following."""
        return [one for run in self.runs for one in run.trainers.values()]

    @property
    def fragments(self) -> list[Fragment]:
        return [one for run in self.runs for one in run.fragments.values()]

    @property
    def blocks(self) -> list[Block]:
        return [one for run in self.runs for one in run.blocks.values()]

    @property
    def nodes(self) -> list[Node]:
        return [one for run in self.runs for one in run.nodes.values()]

    def alive(self, run: RunState) -> bool:
        """Whether the run may still go on: nobody ended it and no other has begun since."""
        return run.ended is None and run.id == self.latest

    def until(self, run: RunState, now: float | None = None) -> float:
        """When the run's account ends: at its end, ``now`` if it is alive, or its last entry."""
        if run.ended is not None:
            return max(run.began.at, run.ended.at)
        return max(run.last_at, now) if now is not None and self.alive(run) else run.last_at
