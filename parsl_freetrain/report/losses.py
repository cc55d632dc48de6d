"""The losses of trainers over samples and over time, thinned for charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.kept_metrics import main_metric
from parsl_freetrain.report.axes import drawable, extremes
from parsl_freetrain.report.timeline import Clock, ending_of

MOST_POINTS = 400  # maximum number of points of one trainer


@dataclass(frozen=True)
class LossPoint:
    """``at_s``: seconds on the report's clock."""

    samples: int
    at_s: float
    loss: float


@dataclass(frozen=True)
class Losses:
    name: str = 'loss'  #: or what the trainer has reported first in its place
    #: One line for each fragment; samples that were repeated after a preemption appear twice.
    fragments: tuple[tuple[LossPoint, ...], ...] = ()
    #: Where fragments were preempted: samples reached, seconds on the report's clock.
    preempted: tuple[tuple[int, float], ...] = ()


def losses(history: History, clock: Clock) -> dict[str, Losses]:
    """By trainer; only those values of its :func:`main_metric` count that can be drawn."""
    lines: dict[str, list[list[LossPoint]]] = {one.name: [] for one in history.trainings}
    struck: dict[str, list[tuple[int, float]]] = {name: [] for name in lines}
    living = {run.id for run in history.runs if history.alive(run)}
    said: dict[str, dict[str, None]] = {name: {} for name in lines}
    for fragment in history.fragments:
        for report in fragment.progress:
            said[fragment.trainer].update(dict.fromkeys(report.metrics))
    names = {trainer: main_metric(known) or 'loss' for trainer, known in said.items()}
    for fragment in history.fragments:
        name = names[fragment.trainer]
        line = [
            LossPoint(report.samples, clock.of(fragment.run, report.at), float(value))
            for report in fragment.progress
            if isinstance(value := report.metrics.get(name), int | float) and drawable(value)
        ]
        if line:
            lines[fragment.trainer].append(line)
        if ending_of(fragment, fragment.run in living) == 'preempted':
            ended = clock.until[fragment.run] if fragment.ended_at is None else fragment.ended_at
            reached = fragment.reached
            if reached is None:
                reached = fragment.from_samples if fragment.seen is None else fragment.seen.samples
            struck[fragment.trainer].append((reached, clock.of(fragment.run, ended)))
    return {name: Losses(names[name], _thinned(lines[name]), tuple(struck[name])) for name in lines}


def _thinned(fragments: Sequence[Sequence[LossPoint]]) -> tuple[tuple[LossPoint, ...], ...]:
    every = -(-sum(map(len, fragments)) // (MOST_POINTS // 2))
    return tuple(extremes(points, every, lambda point: point.loss) for points in fragments)
