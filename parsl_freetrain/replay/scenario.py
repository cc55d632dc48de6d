"""Replays a scenario, and compares it with a constant pool of nodes."""

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from msgspec import field, structs

from parsl_freetrain.core.controller.controller import Controller, DecisionFailed
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.checked_settings import Settings
from parsl_freetrain.core.model.checked_values import NotNegative, PositiveSeconds, Seconds
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.replay.accounting import RecordedJob
from parsl_freetrain.replay.bound import most_samples
from parsl_freetrain.replay.result import Oracle, PoolResult, ReplayResult
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer, objectives_of
from parsl_freetrain.replay.world import CurveLearning, run
from parsl_freetrain.solver import allocator_named


class Scenario(Settings, frozen=True):
    """All inputs of a replay. Raises BadInput for what the trace does not allow."""

    trace: Trace
    trainers: tuple[ReplayTrainer, ...]
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    solver: str = 'auto'  #: by name: :func:`parsl_freetrain.solver.allocator_named`
    time_limit_s: PositiveSeconds = 10.0  #: of the solver, for one decision
    known_ends: bool = False  #: decisions know until when nodes are promised
    rescale_cost: NotNegative = 1.0  #: a factor on the trainers' rescale costs
    rescale_up_s: Seconds | None = None  #: with ``rescale_down_s``: in place of the trainers' own
    rescale_down_s: Seconds | None = None
    by_file: bool = True  #: the objective of the trainers' file counts, not ``settings.metric``
    #: How decisions learn curves; None: known. Then the file's objective would tell them.
    learning: CurveLearning | None = None

    def __post_init__(self) -> None:
        if self.learning is not None and self.by_file:
            raise BadInput(
                "With learned curves decisions do not know the objective of the trainers' file; "
                'name one, such as objective = "speedup" in a study.'
            )
        if self.known_ends and not np.isfinite(self.trace.known_until).any():
            raise BadInput(
                'Nothing is known of the ends of idle intervals in this trace; give a '
                'job log, or leave known ends out.'
            )
        if not any(t.submit_s < self.trace.end_s for t in self.trainers):
            raise BadInput(
                f'No trainer is submitted before {self.trace.end_s:g} s, when the window ends.'
            )
        parts = self.trace.by_class.items()
        by_class = {name: most_at_once(part, self.known_ends) for name, part in parts}
        for t in self.trainers:
            for name, _ in t.trainer.class_curves:
                if name not in by_class:
                    has = ', '.join(filter(None, by_class)) or 'no node classes'
                    raise BadInput(
                        f'Trainer {t.trainer.name!r}: its class_samples_per_s name the node class '
                        f'{name!r}; the trace has {has}.'
                    )
            most = max(nodes for name, nodes in by_class.items() if t.trainer.uses(name))
            if t.trainer.min_nodes > most:
                raise BadInput(
                    f'Trainer {t.trainer.name!r} can never run on this trace: it needs '
                    f'{t.trainer.min_nodes} nodes, and at most {most} '
                    f'{"of one class " if len(by_class) > 1 else ""}are idle at once.'
                )

    def costed(self, trainer: Trainer) -> Trainer:
        up_s = trainer.rescale_up_s if self.rescale_up_s is None else self.rescale_up_s
        down_s = trainer.rescale_down_s if self.rescale_down_s is None else self.rescale_down_s
        factor = self.rescale_cost
        return replace(trainer, rescale_up_s=up_s * factor, rescale_down_s=down_s * factor)


def replay(scenario: Scenario) -> ReplayResult:
    """Replay on the trace, and on a constant pool of its mean number of nodes (by class)."""
    began = perf_counter()
    trace = scenario.trace
    outcome = _run(scenario, trace, scenario.known_ends)
    mean = trace.idle_node_s() / (trace.end_s - trace.start_s)
    constant = _run(scenario, constant_pool(trace), False)
    efficiency, compared = compare(outcome, constant)
    work = oracle = None
    if compared == 'samples' and (there := _work(scenario.trainers, constant)) > 0:
        work = _work(scenario.trainers, outcome) / there
    if scenario.learning is not None:
        told = _run(structs.replace(scenario, learning=None), trace, scenario.known_ends)
        oracle = Oracle(told.samples, *(_work(scenario.trainers, of) for of in (told, outcome)))
    bound = None
    costed = [scenario.costed(t.trainer) for t in scenario.trainers]
    if compared == 'samples' and constant.samples > 0 and not any(t.class_curves for t in costed):
        at_a_time = scenario.settings.trainers_at_a_time or len(costed)
        bound = most_samples(trace, scenario.known_ends, costed, at_a_time) / constant.samples
    took_s, more = perf_counter() - began, (oracle, bound)
    return ReplayResult(outcome, constant, mean, efficiency, compared, work, took_s, *more)


def compare(outcome: PoolResult, constant: PoolResult) -> tuple[float | None, str]:
    if outcome.finished_s is None and constant.finished_s is None:
        return (outcome.samples / constant.samples if constant.samples > 0 else None), 'samples'
    samples = min(outcome.samples, constant.samples)
    taken = outcome.time_to(samples)
    return (constant.time_to(samples) / taken if taken > 0 else None), 'time'


def _work(trainers: Sequence[ReplayTrainer], of: PoolResult) -> float:
    """The node-seconds that the samples would have taken on one node per trainer."""
    # By its speed on its maximum number of nodes (few may hardly move it), of its slowest class.
    one_node = {}
    for t in (r.trainer for r in trainers):
        curves = [curve for _, curve in t.class_curves] or ([t.curve] if t.curve else [])
        rate = min(c.rate_at(1) or c.rate_at(t.max_nodes) / t.max_nodes for c in curves)
        if rate > 0:
            one_node[t.name] = rate
    return sum(of.samples_by_trainer[name] / rate for name, rate in one_node.items())


def _run(scenario: Scenario, trace: Trace, known_ends: bool) -> PoolResult:
    runs = {}
    for t in scenario.trainers:
        trainer = scenario.costed(t.trainer)
        runs[trainer.name] = RecordedJob(trainer, t.submit_s, t.wanted, since=trace.start_s)
    settings = structs.replace(scenario.settings, idle_block_s=float('inf'), retries=0)
    # No child process is needed: a crash of the solver ends only the replay.
    allocator = allocator_named(scenario.solver, time_limit_s=scenario.time_limit_s, isolated=False)
    metric = objectives_of(scenario.trainers) if scenario.by_file else None
    controller = Controller(allocator, settings, metric)
    try:
        return run(trace, known_ends, runs, controller, scenario.learning)
    except DecisionFailed as failed:  # such as a solver that is not for several classes
        raise (failed.__cause__ or failed) from None


def constant_pool(trace: Trace, nodes: int | None = None) -> Trace:
    """So many nodes for the window of a trace; None: the mean number of idle ones by class."""
    duration_s = trace.end_s - trace.start_s
    counts = {name: round(part.idle_node_s() / duration_s) for name, part in trace.by_class.items()}
    if nodes is not None:
        counts = {'': nodes}
    classes = [name for name, count in counts.items() for _ in range(count)]
    count, names = len(classes), tuple(f'node{i:05d}' for i in range(len(classes)))
    start, end = (np.full(count, at) for at in (trace.start_s, trace.end_s))
    rows = start, end, np.arange(count), np.full(count, np.inf)
    return Trace(names, trace.start_s, trace.end_s, *rows, tuple(filter(None, classes)))


def most_at_once(trace: Trace, known_ends: bool) -> int:
    starts, ends, _, _ = trace.intervals(known_ends)
    at = np.unique(starts)
    before = (np.searchsorted(np.sort(moments), at, side='right') for moments in (starts, ends))
    begun, ended = before
    return int((begun - ended).max(initial=0))
