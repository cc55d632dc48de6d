"""What trainers would train in the present holes, as a range, by replaying decisions on them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput, of_file
from parsl_freetrain.core.model.state import FINAL_STATES
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.journal.records import HEAD
from parsl_freetrain.replay.accounting import RecordedJob
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer, objectives_of, read_trainers
from parsl_freetrain.replay.world import run
from parsl_freetrain.report.learned import speeds
from parsl_freetrain.solver import allocator_named

ENDLESS = 10**15  # stands for an unknown total, in samples
APART_S = 0.01  # tells holes that end together apart, where fragments may not span blocks


@dataclass(frozen=True)
class PlannedBlock:
    nodes: int
    walltime_s: float
    # until its nodes are needed, whenever it starts; None: nothing is planned there
    hole_s: float | None = None
    preemptible: bool = False  # its nodes may be taken at any time
    exempt_s: float = 0.0  # after its start, in which they are not taken
    node_class: str = ''

    def time(self, late_s: float) -> tuple[float, float]:
        end_s = late_s + self.walltime_s
        return late_s, end_s if self.hole_s is None else min(end_s, self.hole_s)


@dataclass(frozen=True)
class Forecast:
    trainer: str
    left: int | None  # samples to train; None: unknown
    samples: tuple[float, float]  # fewest and most trained in the holes
    # earliest and latest, from now; None: not in these holes
    finish_s: tuple[float | None, float | None]


def trainers_at(path: Path) -> list[ReplayTrainer]:
    """Those of a trainers' file, or the unfinished ones of a ledger's newest run; BadInput."""
    remedy = 'give a JSON list of trainers, or a ledger'
    with of_file(f'{path} cannot be read', remedy), path.open('rb') as file:
        is_ledger = file.read(len(HEAD)) == HEAD
    return _of_ledger(path) if is_ledger else list(read_trainers(path))


def _of_ledger(path: Path) -> list[ReplayTrainer]:
    history = Journal(path).history()
    if not history.runs:
        raise BadInput(f'The ledger {path} has no run yet.')
    known = speeds(history)
    found = []
    for one in history.runs[-1].trainers.values():
        if one.state in FINAL_STATES:
            continue
        curves = {
            node_class: curve
            for node_class in known[one.name].measured
            if (curve := known[one.name].curve(node_class=node_class)) and '+' not in node_class
        }
        if not curves:
            raise BadInput(
                f'The ledger {path} does not know yet how fast {one.name!r} trains; wait '
                'until it has trained for some seconds.'
            )
        total = one.trainer.total_samples
        trainer = Trainer(
            one.name,
            one.trainer.min_nodes,
            one.trainer.max_nodes,
            ENDLESS if total is None else max(1, total - one.samples),
            curves.get(''),
            one.trainer.rescale_up_s,
            one.trainer.rescale_down_s,
            sizes=one.trainer.sizes,
            class_curves=tuple((name, curve) for name, curve in curves.items() if name),
        )
        found.append(ReplayTrainer(trainer, 0.0, next(iter(curves.values()))))
    if not found:
        raise BadInput(f'No trainer of the newest run in {path} has anything left to train.')
    return found


def forecasts(
    blocks: Sequence[PlannedBlock],
    trainers: Sequence[ReplayTrainer],
    settings: ControllerSettings,
    start_s: float,
    look_ahead_s: float,
) -> list[Forecast]:
    """At most: all blocks start at once. At least: late, and preempted as soon as may be."""
    early, late = [], []
    for block in blocks:
        start, end = block.time(0.0)
        early.append((block, start, min(end, look_ahead_s) if block.preemptible else end))
        start, end = block.time(start_s)
        late.append((block, start, min(end, start + block.exempt_s) if block.preemptible else end))
    most, least = (_trained(each, trainers, settings) for each in (early, late))
    return [_between(t.trainer, most[t.trainer.name], least[t.trainer.name]) for t in trainers]


def _between(
    trainer: Trainer, one: tuple[float, float | None], other: tuple[float, float | None]
) -> Forecast:
    # If trainers compete, the case that is better for all may be worse for one.
    few, many = sorted((one[0], other[0]))
    early, late = sorted((one[1], other[1]), key=lambda at: math.inf if at is None else at)
    total = None if trainer.total_samples == ENDLESS else trainer.total_samples
    return Forecast(trainer.name, total, (few, many), (early, late))


def _trained(
    blocks: Sequence[tuple[PlannedBlock, float, float]],
    trainers: Sequence[ReplayTrainer],
    settings: ControllerSettings,
) -> dict[str, tuple[float, float | None]]:
    if not settings.spans_blocks:  # a trace identifies a block by its end
        blocks = [(block, start, end - APART_S * i) for i, (block, start, end) in enumerate(blocks)]
    there = [(block, start, end) for block, start, end in blocks if block.nodes and end > start]
    if not there or not trainers:
        return {t.trainer.name: (0.0, None) for t in trainers}
    counts = np.array([block.nodes for block, _, _ in there])
    names = tuple(f'block-{i}/{k}' for i, count in enumerate(counts) for k in range(count))
    columns = ([block[i] for block in there] for i in (1, 2))
    starts, ends = (np.repeat(np.array(one, dtype=np.float64), counts) for one in columns)
    classes = np.repeat([block.node_class for block, _, _ in there], counts).tolist()
    index, classes_of = np.arange(len(names)), tuple(classes) if any(classes) else ()
    trace = Trace(names, 0.0, float(ends.max()), starts, ends, index, ends, classes_of)
    runs = {t.trainer.name: RecordedJob(t.trainer, t.submit_s, t.wanted) for t in trainers}
    solver = allocator_named('auto', isolated=False)
    settings = structs.replace(settings, idle_block_s=math.inf, retries=0)
    run(trace, True, runs, Controller(solver, settings, objectives_of(trainers)))
    return {name: (max(0.0, one.samples), one.done_s) for name, one in runs.items()}
