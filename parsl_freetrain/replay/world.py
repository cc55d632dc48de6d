"""The virtual clock and world of a replay's controller. Actions and consequences happen at once."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from time import perf_counter
from typing import Any

import numpy as np

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.runtime import carry_out
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import Count, PositiveSeconds, Share
from parsl_freetrain.core.model.events import Ending
from parsl_freetrain.replay.accounting import Accounts, Idle, Interruption, RecordedJob
from parsl_freetrain.replay.result import PoolResult
from parsl_freetrain.replay.trace import PoolChange, Trace


class CurveLearning(Settings, frozen=True, kw_only=True):
    """How curves are learned that the controller is not told."""

    noise: Share = 0.0  #: standard deviation of the logarithm of a measured rate
    #: a fragment's speed is measured after so long, then twice, four times ...
    measure_s: PositiveSeconds = 10.0
    seed: Count = 0  #: of the noise


class Measuring:
    def __init__(self, learning: CurveLearning) -> None:
        self._learning = learning
        self._random = np.random.default_rng(learning.seed)
        self._due: list[tuple[float, str, int, float]] = []

    def begin(self, run: RecordedJob) -> None:
        wait_s = self._learning.measure_s
        heappush(self._due, (run.started_s + wait_s, run.trainer.name, run.fragment, wait_s))

    def next_s(self, runs: Mapping[str, RecordedJob]) -> float:
        while self._due:
            at, name, fragment, _ = self._due[0]
            if runs[name].nodes and runs[name].fragment == fragment:
                return at
            heappop(self._due)
        return math.inf

    def due(self, at: float, runs: Mapping[str, RecordedJob]) -> list[ev.Event]:
        events: list[ev.Event] = []
        while self.next_s(runs) <= at:
            _, name, fragment, wait_s = heappop(self._due)
            run = runs[name]
            heappush(self._due, (at + wait_s, name, fragment, 2 * wait_s))
            factor = math.exp(self._learning.noise * self._random.standard_normal())
            samples = max(int(run.samples + run.rate * (at - run.since)), 0)
            events.append(ev.FragmentProgressed(at, name, fragment, samples, run.rate * factor))
        return events


class World:
    """Nodes, fragments, progress: a replay's Runtime. ``measuring``: None: speeds are known."""

    def __init__(
        self,
        controller: Controller,
        accounts: Accounts,
        trainers: dict[str, RecordedJob],
        measuring: Measuring | None = None,
    ) -> None:
        self._measuring, self._controller, self._accounts = measuring, controller, accounts
        self._runs = trainers
        self._interrupted: dict[str, tuple[tuple[int, float], Interruption]] = {}  # in this instant
        self._touched: dict[str, None] = {}
        self._followed: list[ev.Event] = []  # of the actions of one decision
        self._completions: list[tuple[float, int, str]] = []

    def next_completion_s(self) -> float | None:
        while self._completions:
            at, version, name = self._completions[0]
            if self._runs[name].version == version:
                return at
            heappop(self._completions)
        return None

    def next_measurement_s(self) -> float:
        return self._measuring.next_s(self._runs) if self._measuring else math.inf

    def happen(
        self,
        at: float,
        leaving: ev.NodesLeft | None,
        joining: Sequence[ev.NodesJoined],
        closing: Sequence[ev.BlockClosed],
        submitted: Sequence[RecordedJob],
    ) -> None:
        """An instant: nodes leave and join, trainers finish and are submitted; decide once."""
        self._accounts.advance(at)
        events: list[ev.Event] = []
        finished: dict[str, None] = {}
        while (next_s := self.next_completion_s()) is not None and next_s <= at:
            finished[heappop(self._completions)[2]] = None
        if leaving is not None:
            hit = filter(None, map(self._controller.state.pool.holder.get, leaving.nodes))
            losers = dict.fromkeys(name for name in hit if name not in finished)
            ends = {name: self._runs[name].deadline_s for name in losers}
            due = [name for name, end in ends.items() if end is not None and end <= at]
            events += (self._ended(name, at, Interruption.EXPIRED) for name in due)
            events.append(leaving)
        events += closing
        events += joining
        events += (self._ended(name, at, None) for name in finished)
        if self._measuring:
            events += self._measuring.due(at, self._runs)
        unknown: dict[str, Any] = {'curve': None, 'class_curves': ()} if self._measuring else {}
        events += (ev.TrainerSubmitted(at, replace(run.trainer, **unknown)) for run in submitted)
        if not events:  # a budget is spent, for which there is no event
            events.append(ev.Tick(at))
        began = perf_counter()
        while events:
            reply = self._controller.handle_all(events)
            self._followed = []
            carry_out(self, reply.actions, at)
            self._refuse_failures(reply.actions)
            events = self._followed
        thought_s = perf_counter() - began
        self._settle()
        pool = self._controller.state.pool
        free = len(pool.nodes) - self._accounts.used
        idle = why_unused(self._controller, self._runs, at) if free else Idle()
        self._accounts.close_instant(len(pool.nodes), idle, thought_s)

    def _ended(self, name: str, at: float, cause: Interruption | None) -> ev.FragmentEnded:
        """``cause``: None: it has finished."""
        run = self._runs[name]
        before = run.nodes, run.rate
        self._accounts.train(run, 0, 0.0)
        self._touched[name] = None
        if cause is None:
            run.samples, run.done_s, ending = float(run.total), at, Ending.FINISHED
        else:
            ending = Ending.PREEMPTED if cause is Interruption.PREEMPTED else Ending.STOPPED
            self._interrupted.setdefault(name, (before, cause))
        return ev.FragmentEnded(at, name, run.fragment, max(int(run.samples), 0), ending)

    def open(self, block: object, at: float) -> None:
        """No effect, as of the next two: the trace determines the nodes."""

    close = release = open

    def launch(self, fragment: ev.StartFragment, at: float) -> None:
        run, count = self._runs[fragment.trainer], len(fragment.nodes)
        node_class = self._controller.state.pool.nodes[fragment.nodes[0]].node_class
        curve = run.trainer.curve_on(node_class)
        self._accounts.train(run, count, curve.rate_at(count) if curve else 0.0)
        run.fragment, run.deadline_s = fragment.fragment, fragment.deadline_s
        self._touched[fragment.trainer] = None

    def send(self, stop: ev.StopFragment, at: float) -> None:
        self._end(stop, at, Interruption.STOPPED)

    def kill(self, fragment: ev.AbandonFragment, at: float) -> None:
        self._end(fragment, at, Interruption.PREEMPTED)

    def _end(
        self, action: ev.StopFragment | ev.AbandonFragment, at: float, cause: Interruption
    ) -> None:
        run = self._runs[action.trainer]
        if run.nodes and run.fragment == action.fragment:
            self._followed.append(self._ended(action.trainer, at, cause))

    def _refuse_failures(self, actions: Sequence[ev.Action]) -> None:
        ends = (one for one in actions if isinstance(one, ev.EndTrainer))
        for end in ends if not self._controller.settings.budgets else ():
            if end.state != 'finished':
                said = f'In a replay trainer {end.trainer} ended as {end.state}: {end.why}'
                raise AssertionError(said)

    def _settle(self) -> None:
        """Charge the costs of this instant, and predict completions again."""
        for name, (before, cause) in self._interrupted.items():
            if self._runs[name].done_s is None:
                self._accounts.charge(self._runs[name], before, cause)
        for name in self._touched:
            run = self._runs[name]
            if run.rate > 0:
                heappush(self._completions, (run.completion_s(), run.version, name))
                if self._measuring:
                    self._measuring.begin(run)
        self._interrupted.clear()
        self._touched.clear()


def why_unused(controller: Controller, runs: Mapping[str, RecordedJob], at: float) -> Idle:
    """The free nodes after a decision, by the cause for which they train nothing."""
    settings, pool = controller.settings, controller.state.pool
    idle = Idle()
    free: Counter[str] = Counter()  # by class, as below
    lasting: dict[str, Counter[str]] = {}  # by block
    for group in pool.groups.values():
        if group.until_s - at < controller.state.shortest_s:
            idle.too_short += len(group.free)
            continue
        free[group.node_class] += len(group.free)
        if group.until_s - at >= settings.horizon_s:
            lasting.setdefault(group.node_class, Counter())[group.block] += len(group.free)
    if not free.total():
        return idle
    used = len(pool.holder)
    most = math.inf if settings.max_nodes is None else settings.max_nodes
    allowed = min(most, free.total() + used - settings.keep_free)
    idle.kept_free = kept = int(max(free.total() - max(allowed - used, 0), 0))
    together = sum if settings.spans_blocks else max
    for node_class, count in free.items():
        there = min(kept, count)
        kept -= there
        lasts, left = together(lasting.get(node_class, {'': 0}).values()), count - there
        _sort(controller, runs, node_class, left, min(left, lasts), idle)
    return idle


def _sort(
    controller: Controller,
    runs: Mapping[str, RecordedJob],
    node_class: str,
    free: int,
    lasting: int,
    idle: Idle,
) -> None:
    """Add the free nodes of one class, of which some last for the horizon."""
    could_start = could_grow = 0
    for name, bidder in controller.state.active.items():
        run = runs[name]
        if bidder.running is not None and run.nodes:
            if bidder.running.node_class == node_class:
                could_grow += max(run.wanted - run.nodes, 0)
        elif run.trainer.min_nodes <= lasting and run.trainer.uses(node_class):
            could_start += run.wanted
    stranded = min(lasting, could_start)
    not_worth = min(free - stranded, could_grow)
    idle.stranded += stranded
    idle.not_worth += not_worth
    idle.no_use += free - stranded - not_worth


EVERYTHING = 'idle'


class Holes:
    """One for nodes that become idle and leave together; without ends, one for each node class."""

    def __init__(self, names: Sequence[str], apart: bool, classes: Sequence[str] = ()) -> None:
        self._names, self._apart = names, apart
        self._classes = classes or ('',) * len(names)
        self._block: dict[int, str] = {}
        self._size: dict[str, int] = {}

    def leave(self, change: PoolChange) -> tuple[ev.NodesLeft | None, list[ev.BlockClosed]]:
        left = change.left.tolist()
        if not left:
            return None, []
        closed: list[ev.BlockClosed] = []
        for node in left if self._apart else ():
            block = self._block.pop(node)
            self._size[block] -= 1
            if not self._size[block]:
                del self._size[block]
                closed.append(ev.BlockClosed(change.at, block))
        return ev.NodesLeft(change.at, tuple(self._names[node] for node in left)), closed

    def join(self, change: PoolChange) -> list[ev.NodesJoined]:
        alike: dict[tuple[float, str], list[int]] = {}
        for node, until in zip(change.joined.tolist(), change.known_until.tolist(), strict=True):
            alike.setdefault((until, self._classes[node]), []).append(node)
        events = []
        for (until, node_class), nodes in alike.items():
            block = f'{change.at:.3f}-{until:.3f}' if self._apart else EVERYTHING
            block += f'-{node_class}' if node_class else ''
            if self._apart:
                self._block.update(dict.fromkeys(nodes, block))
                self._size[block] = len(nodes)
            named = tuple(self._names[node] for node in nodes)
            end = None if math.isinf(until) else until
            events.append(ev.NodesJoined(change.at, block, named, end, node_class))
        return events


def run(
    trace: Trace,
    known_ends: bool,
    trainers: dict[str, RecordedJob],
    controller: Controller,
    learning: CurveLearning | None = None,
) -> PoolResult:
    """Train on a recorded pool as ``controller`` decides, once an instant; without time steps."""
    accounts = Accounts(trace.start_s)
    world = World(controller, accounts, trainers, None if learning is None else Measuring(learning))
    known = known_ends or not controller.settings.spans_blocks
    holes = Holes(trace.names, known, trace.node_classes)
    changes = trace.changes(known_ends)
    in_order = sorted(trainers.values(), key=lambda trainer: trainer.submit_s)
    within = [trainer for trainer in in_order if trainer.submit_s < trace.end_s]
    queue = [(max(trainer.submit_s, trace.start_s), trainer) for trainer in within]
    c = s = 0
    while True:
        completion = world.next_completion_s()
        at = min(
            changes[c].at if c < len(changes) else math.inf,
            queue[s][0] if s < len(queue) else math.inf,
            math.inf if completion is None else completion,
            controller.state.next_change_s(),
            world.next_measurement_s(),
        )
        if at > trace.end_s:
            break
        leaving: ev.NodesLeft | None = None
        closing: list[ev.BlockClosed] = []
        joining: list[ev.NodesJoined] = []
        if c < len(changes) and changes[c].at == at:
            leaving, closing = holes.leave(changes[c])
            joining = holes.join(changes[c])
            c += 1
        submitted: list[RecordedJob] = []
        while s < len(queue) and queue[s][0] == at:
            submitted.append(queue[s][1])
            s += 1
        world.happen(at, leaving, joining, closing, submitted)
    accounts.advance(trace.end_s)
    return accounts.outcome(trainers)
