"""What trainers would train in the holes of now, as a range: the decisions of a run, replayed on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from parsl_freetrain.core.controller import Controller
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.profile import Profile
from parsl_freetrain.core.state import ControllerSettings
from parsl_freetrain.core.words import Trainer
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FINAL_STATES
from parsl_freetrain.replay.accounting import Run
from parsl_freetrain.replay.engine import run
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import read_trainers
from parsl_freetrain.report.speed import Speed
from parsl_freetrain.solver import allocator_named

SQLITE = b'SQLite format 3\0'
ENDLESS = 10**15
"""Stands for a total that is not known, in samples."""


@dataclass(frozen=True)
class Prospect:
    """What one trainer can expect of the holes of now.

    Attributes
    ----------
    left
        Samples that it has yet to train; None: unknown.
    samples
        Trained in the holes, at least and at most.
    finish_s
        Seconds from now until it is finished, at the earliest and at the latest; None: not in these holes.
    """

    trainer: str
    left: int | None
    samples: tuple[float, float]
    finish_s: tuple[float | None, float | None]


def trainers_at(path: Path) -> list[Trainer]:
    """The trainers of a file as ``freetrain replay`` takes it; or of a ledger's newest run those that are not over, with what is left.

    Raises
    ------
    BadInput
        The file cannot be used, or says nothing of a trainer's speed, or nobody in it has anything left to train.
    """
    try:
        with path.open('rb') as file:
            is_ledger = file.read(len(SQLITE)) == SQLITE
    except OSError as error:
        raise BadInput(f'{path} cannot be read ({error.strerror}); give a JSON list of trainers, or a ledger.') from None
    return _of_ledger(path) if is_ledger else [t.trainer for t in read_trainers(path)]


def _of_ledger(path: Path) -> list[Trainer]:
    with Reader(path) as reader:
        runs = reader.story().runs
        if not runs:
            raise BadInput(f'The ledger {path} has no run yet.')
        story, progress = reader.story(runs[-1].name), reader.progress()
        width = {fragment.key: len(fragment.nodes) for fragment in reader.story().fragments}
    found = []
    for row in story.trainers:
        if row.state in FINAL_STATES:
            continue
        speed = Speed(row.spec)
        for report in progress:
            if report.trainer == row.name:
                speed.observe(width.get((report.run, report.trainer, report.fragment), 0), report.rate)
        curve = speed.curve()
        if curve is None:
            raise BadInput(f'The ledger {path} does not know yet how fast {row.name!r} trains; wait until it has trained for some seconds.')
        left = ENDLESS if row.total_samples is None else max(1, row.total_samples - row.samples)
        found.append(Trainer(row.name, int(row.spec.get('min_nodes') or 1), int(row.spec.get('max_nodes') or 1), left, curve,
                             float(row.spec.get('rescale_up_s') or 0.0), float(row.spec.get('rescale_down_s') or 0.0)))
    if not found:
        raise BadInput(f'No trainer of the newest run in {path} has anything left to train.')
    return found


def prospects(blocks: Sequence[tuple[int, float | None]], trainers: Sequence[Trainer], settings: ControllerSettings, start_s: float,
              look_ahead_s: float) -> list[Prospect]:
    """What the trainers would train on these blocks and nothing else, if nothing else happened.

    At most: every block starts at once, and one that can be preempted lasts for ``look_ahead_s``. At least: every block starts
    ``start_s`` seconds later and ends no later, and one that can be preempted is at once.

    Parameters
    ----------
    blocks
        Nodes, and seconds from now until the end; None: until preempted.
    """
    most = _trained([(nodes, 0.0, look_ahead_s if end is None else end) for nodes, end in blocks], trainers, settings)
    least = _trained([(nodes, start_s, end) for nodes, end in blocks if end is not None], trainers, settings)
    return [_between(t, most[t.name], least[t.name]) for t in trainers]


def _between(trainer: Trainer, one: tuple[float, float | None], other: tuple[float, float | None]) -> Prospect:
    # Where trainers compete, what is better for all may be worse for one.
    few, many = sorted((one[0], other[0]))
    early, late = sorted((one[1], other[1]), key=lambda at: math.inf if at is None else at)
    return Prospect(trainer.name, None if trainer.total_samples == ENDLESS else trainer.total_samples, (few, many), (early, late))


def _trained(blocks: Sequence[tuple[int, float, float]], trainers: Sequence[Trainer],
             settings: ControllerSettings) -> dict[str, tuple[float, float | None]]:
    """By trainer: samples, and when it was finished."""
    there = [(nodes, start, end) for nodes, start, end in blocks if nodes and end > start]
    if not there:
        return {t.name: (0.0, None) for t in trainers}
    counts = np.array([nodes for nodes, _, _ in there])
    names = tuple(f'block-{i}/{k}' for i, (nodes, _, _) in enumerate(there) for k in range(nodes))
    starts, ends = (np.repeat(np.array([block[column] for block in there], dtype=np.float64), counts) for column in (1, 2))
    trace = Trace(names, 0.0, float(ends.max()), starts, ends, np.arange(len(names)), ends)
    runs = {t.name: Run(t, 0.0, Profile(t.curve).best_count(t.counts())) for t in trainers}
    controller = Controller(allocator_named('auto', isolated=False), replace(settings, idle_block_s=math.inf, retries=0))
    run(trace, True, runs, controller)
    return {name: (max(0.0, one.samples), one.done_s) for name, one in runs.items()}
