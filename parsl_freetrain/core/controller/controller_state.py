"""The controller's state: trainers, nodes and blocks that have not ended."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from parsl_freetrain.core.allocation.problem import Answer, Problem, record_of
from parsl_freetrain.core.controller.budgets import Budgets, Charges
from parsl_freetrain.core.controller.node_pool import GroupKey, Pool, key_of
from parsl_freetrain.core.controller.overheads import Measured
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.controller.throughput_profile import ClassProfiles, Profile, ShapeChoice
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Trainer


@dataclass
class FragmentState:
    number: int
    nodes: tuple[str, ...]
    deadline_s: float | None
    from_samples: int
    shape: int = 0  # its place among the shapes of its node count
    stopping: bool = False  # has been asked to stop at a step boundary
    broken: bool = False  # some of its nodes are gone
    node_class: str = ''

    def used_up(self, at: float) -> bool:
        """Whether its nodes left when they were expected to leave, not before."""
        return self.broken and self.deadline_s is not None and at >= self.deadline_s - 1

    def ending(self, at: float, lead_s: float) -> bool:
        """Whether it is ending or will end soon, so that its nodes count as free."""
        soon = self.deadline_s is not None and self.deadline_s - at < lead_s
        return self.stopping or self.broken or soon


@dataclass
class TrainerState:
    trainer: Trainer
    samples: int
    fragments: int
    profiles: ClassProfiles
    measured: Measured = field(default_factory=Measured)
    running: FragmentState | None = None
    former: tuple[str, ...] = ()  # the nodes of the last fragment
    errors: int = 0
    stalled: int = 0
    failures: int = 0  # consecutive ones that failed without progress, on nodes that were there
    submitted_at: float = 0.0
    waiting_since: float = 0.0  # since when it has had no nodes
    reached: int = 0  # samples trained so far, saved or not
    trouble_since: float = math.inf  # of a file system, without progress
    fruitless: int = 0  # consecutive fragments that used up their holes without progress
    dismissed: ev.EndTrainer | None = None  # how it ends as soon as its fragment has stopped
    rescaled_at: float = -math.inf  # when its node count was last changed
    shapes: ShapeChoice = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = ShapeChoice(dict(self.trainer.shapes))

    def learn(self, rate: float) -> bool:
        """Add a reported speed; whether the best shape's curve may give a new decision."""
        assert self.running is not None
        nodes, shape = len(self.running.nodes), self.running.shape
        profile, before = self.profiles.on(self.running.node_class), self.shapes.best(nodes)
        self.shapes.observe(nodes, shape, rate)
        best = self.shapes.best(nodes)
        if best != before:
            profile.forget(nodes)
        return best == shape and profile.observe(nodes, rate)

    def piece_s(self) -> float:
        """Seconds until the piece of a round ends that runs; infinite where that is not known."""
        if (run := self.running) is None:
            return math.inf
        rate = self.profiles.on(run.node_class).measured.get(len(run.nodes))
        return self.trainer.left_of_round(self.reached)[1] / rate if rate else math.inf

    def wanted_nodes(self) -> int:
        return self.profiles.best().best_count(self.trainer.counts())

    def useful_counts(self) -> Sequence[int]:
        """The node counts that it may have and that are faster than all smaller ones."""
        counts = self.trainer.counts()
        return counts[: counts.index(self.wanted_nodes()) + 1]


@dataclass
class BlockState:
    request: BlockRequest
    until_s: float | None = None
    nodes: set[str] = field(default_factory=set)
    arrived: set[str] = field(default_factory=set)  # every node that joined since it was queued
    idle_since: float | None = None
    begun_s: float | None = None  # when it got its nodes, at the earliest

    @property
    def exempt_until_s(self) -> float:
        """Nothing preempts it before; in the past where that is not known."""
        return -math.inf if self.begun_s is None else self.begun_s + self.request.exempt_s


@dataclass(frozen=True)
class Yielded:
    """A node that is given back as soon as no fragment runs on it, by ``by_s`` at the latest."""

    block: str
    whole_block: bool
    why: str
    by_s: float


class Rounds:
    """How far the replicas of trainings are: by training and name, samples of the whole order."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[str, float]] = {}

    def trainer_reached(self, trainer: Trainer, samples: float) -> None:
        if trainer.training:
            self.replica_reached(trainer.training, trainer.name, samples)

    def replica_reached(self, training: str, replica: str, samples: float) -> None:
        known = self._samples.setdefault(training, {})
        known[replica] = samples
        if min(known.values()) == math.inf:  # all have ended
            del self._samples[training]

    def waits(self, trainer: Trainer, samples: int) -> bool:
        if not trainer.training or not trainer.round_samples:
            return False
        known = self._samples[trainer.training].values()
        slowest = min(known) if len(known) == trainer.replicas else 0
        length = trainer.round_samples
        return samples // length - slowest // length > trainer.ahead(samples)

    def others_ended(self, trainer: Trainer) -> bool:
        known = self._samples.get(trainer.training, {})
        return len(known) > 1 and {v for k, v in known.items() if k != trainer.name} == {math.inf}


class ControllerState:
    """Everything that has not ended; trainers in order of submission."""

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.shortest_s = self.longest_s = self._min_hole_s = settings.min_hole_s
        self.budgets = Budgets(settings.budgets, settings.used_before)
        self.charges = Charges(settings.charge_budget, settings.charged_before)
        self._timed = False
        self.trainers: dict[str, TrainerState] = {}
        self.active: dict[str, TrainerState] = {}  # those whose turn it is: they bid for nodes
        # A set: trainers whose bids may have to change; Bids.refresh clears it.
        self.changed: dict[str, None] = {}
        self.pool = Pool()
        self.blocks: dict[str, BlockState] = {}
        self.classes: tuple[str, ...] = ()  # of all nodes ever joined, where told apart
        self.closed: set[str] = set()  # events about these blocks come late
        self.yielded: dict[str, Yielded] = {}  # nodes about to be given back; some have not joined
        self.ordinary = 0  # Parsl tasks that wait or run
        self.shutting_down = False
        most = settings.trainers_at_a_time
        self._at_a_time = math.inf if most is None else most
        self._queue: dict[str, TrainerState] = {}
        self._functions: dict[tuple[str, str], list[Profile]] = {}
        self._pausing: dict[str, float] = {}  # trainers that wait after failures, and until when
        self._leaving: dict[str, TrainerState] = {}
        self._rounds = Rounds()
        self._at_gate: dict[str, TrainerState] = {}  # replicas that wait for others of their round

    def timed(self) -> None:
        """Update the shortest useful times (seconds, two digits: changes renew all bids)."""
        least = self._min_hole_s
        each = [t.measured.shortest_s(least) for t in self.active.values()] or [least]
        self.shortest_s, self.longest_s = float(f'{min(each):.1e}'), max(each)
        self._timed = True

    def exempt_until(self, nodes: Iterable[str], at: float) -> float | None:
        """Until when nothing preempts any of these nodes; None if that is over or not known."""
        known = [self.blocks.get(self.pool.nodes[node].block) for node in nodes]
        until_s = min(block.exempt_until_s if block else -math.inf for block in known)
        return until_s if until_s > at else None

    def profiles_of(self, trainer: Trainer) -> ClassProfiles:
        """The profiles of a new trainer, which learns from others of its function."""
        if replicas := self.siblings(trainer):
            return replicas[0].profiles  # so that no two of them change places
        if not trainer.function:
            return ClassProfiles(trainer)
        function = trainer.function
        known = self._functions.setdefault
        return ClassProfiles(trainer, lambda node_class: known((function, node_class), []))

    def see_class(self, node_class: str) -> None:
        """Note that nodes of a class have joined: all trainers bid for it from now on."""
        if node_class and node_class not in self.classes:
            self.classes = tuple(sorted((*self.classes, node_class)))
            self.changed.update(dict.fromkeys(self.active))

    def submit(self, name: str, trainer: TrainerState) -> None:
        """Add a trainer; it gets its turn if fewer than the allowed number are before it."""
        self.trainers[name] = trainer
        self._rounds.trainer_reached(trainer.trainer, trainer.samples)
        self._queue_up(name)
        self.open_gates(trainer.trainer.training)

    def dismiss(self, end: ev.EndTrainer) -> None:
        name = end.trainer
        trainer = self.trainers[name]
        trainer.dismissed = end
        self._withdraw(name)
        if trainer.running:
            self._leaving[name] = trainer

    def pause(self, name: str, until_s: float) -> None:
        """Give a trainer no nodes until then; the next one gets its turn."""
        self._withdraw(name)
        self._pausing[name] = until_s

    def end_pauses(self, at: float) -> bool:
        """Queue the trainers whose pause is over; whether there are any."""
        over = [name for name, until_s in self._pausing.items() if until_s <= at]
        for name in over:
            del self._pausing[name]
            self._queue_up(name)
        self._admit()
        return bool(over)

    def next_change_s(self) -> float:
        """When something happens next without an event: a budget is spent, or a pause is over."""
        return min([self.budgets.next_spent(), *self._pausing.values()])

    def remove(self, name: str) -> None:
        self._rounds.trainer_reached(self.trainers.pop(name).trainer, math.inf)
        self._leaving.pop(name, None)
        self._withdraw(name)

    def siblings(self, trainer: Trainer) -> list[TrainerState]:
        others = self.trainers.values() if trainer.training else ()
        same = [one for one in others if one.trainer.training == trainer.training]
        return [one for one in same if one.trainer.name != trainer.name]

    def check_gate(self, trainer: TrainerState) -> None:
        """A replica that ends a round waits for the others, which may go on with the last one."""
        spec = trainer.trainer
        self._rounds.trainer_reached(spec, trainer.samples)
        bids = spec.name in self.active or spec.name in self._queue
        if bids and self._rounds.waits(spec, trainer.samples):
            self._withdraw(spec.name)
            self._at_gate[spec.name] = trainer
        self.open_gates(spec.training)

    def misses_state(self, trainer: TrainerState, ended: FragmentState) -> str:
        """Why it cannot end a training whose other replicas have, after stops by itself."""
        spec, tries = trainer.trainer, trainer.failures + 1
        asked = ended.stopping or ended.broken
        if asked or tries < self.settings.stalls or not self._rounds.others_ended(spec):
            return ''
        return (
            f'{tries} fragments in a row stopped behind its last round: either what a replica has '
            'saved there is damaged (call the function again, which trains the rest of that piece '
            'once more), or what is behind the loop takes longer than the holes'
        )

    def reached_elsewhere(self, event: ev.ReplicaReached) -> None:
        samples = math.inf if event.samples is None else event.samples
        self._rounds.replica_reached(event.training, event.trainer, samples)
        self.open_gates(event.training)

    def open_gates(self, training: str) -> None:
        for name, waiting in list(self._at_gate.items()):
            if waiting.trainer.training == training:
                del self._at_gate[name]
                self._queue_up(name)
        self._admit()

    def _queue_up(self, name: str) -> None:
        trainer = self.trainers[name]
        waits = self._rounds.waits(trainer.trainer, trainer.samples)
        (self._at_gate if waits else self._queue)[name] = trainer

    def start(self, name: str, trainer: TrainerState, running: FragmentState, at: float) -> None:
        trainer.running = running
        self.pool.hold(running.nodes, name)
        self.budgets.change(trainer.trainer, len(running.nodes), at)
        self.changed[name] = None

    def end(self, name: str, trainer: TrainerState, at: float) -> FragmentState:
        ended = trainer.running
        assert ended is not None
        trainer.running, trainer.former = None, ended.nodes
        self.pool.release(ended.nodes, name)
        self.budgets.change(trainer.trainer, -len(ended.nodes), at)
        self.changed[name] = None
        return ended

    def stop(self, name: str, running: FragmentState) -> None:
        running.stopping = True
        self.changed[name] = None

    def ask_to_stop(
        self, name: str, why: str, leaving: tuple[str, ...] = ()
    ) -> list[ev.StopFragment]:
        """Stop a trainer's fragment, unless there is none or it is ending already."""
        running = self.trainers[name].running
        if running is None or running.stopping or running.broken:
            return []
        self.stop(name, running)
        return [ev.StopFragment(name, running.number, why, leaving=leaving)]

    def lose(self, nodes: Iterable[str]) -> dict[str, TrainerState]:
        """Remove nodes; return the trainers whose running fragments are broken by this."""
        broken: dict[str, TrainerState] = {}
        for name in nodes:
            node = self.pool.nodes.get(name)
            if node is None:
                continue
            holder = self.pool.leave(name)
            if node.block in self.blocks:
                self.blocks[node.block].nodes.discard(name)
            running = self.trainers[holder].running if holder is not None else None
            if holder is not None and running and not running.broken:
                running.broken = True
                self.changed[holder] = None
                broken[holder] = self.trainers[holder]
        return broken

    def leaving(self) -> dict[GroupKey, int]:
        """By group, nodes that dismissed trainers still hold, and that are not available yet."""
        count: dict[GroupKey, int] = {}
        for name, trainer in self._leaving.items():
            for node in trainer.running.nodes if trainer.running else ():
                if self.pool.holder.get(node) == name:
                    key = key_of(self.pool.nodes[node])
                    count[key] = count.get(key, 0) + 1
        return count

    def _withdraw(self, name: str) -> None:
        self._queue.pop(name, None)
        self._pausing.pop(name, None)
        self._at_gate.pop(name, None)
        if self.active.pop(name, None):
            self.changed[name] = None
        self._admit()

    def _admit(self) -> None:
        while self._queue and len(self.active) < self._at_a_time:
            name = next(iter(self._queue))
            self.active[name] = self._queue.pop(name)
            self.changed[name] = None
        if self._timed:
            self.timed()


@dataclass(frozen=True)
class Decision:
    at: float
    trigger: str  # the classes of the events that led to it
    nodes: int  # to allocate
    current: dict[str, int]  # nodes by trainer before it
    staying: float  # the objective of keeping what runs
    answer: Answer
    problem: Problem  # solved once, also if several events carry the plan out
    actions: tuple[ev.Action, ...]  # immediate ones; fragments that wait for nodes start later

    def event(self, at: float, actions: tuple[ev.Action, ...], *, keep_problem: bool) -> ev.Decided:
        answer = self.answer
        asked = self.trigger, self.nodes, answer.status, answer.solver
        worths = answer.objective, answer.bound, self.staying, answer.seconds
        counts = dict(self.current), dict(answer.allocation)
        kept = ev.packed(record_of(self.problem)) if keep_problem else b''
        return ev.Decided(at, actions, *asked, *worths, *counts, kept)


@dataclass(frozen=True)
class Reply:
    actions: tuple[ev.Action, ...] = ()
    decision: Decision | None = None
