"""The losses of trainers over samples and over time, thinned for charts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parsl_freetrain.ledger.clock import Clock
from parsl_freetrain.ledger.rows import ProgressRow, RunHistory
from parsl_freetrain.ledger.timeline import ending_of
from parsl_freetrain.report.axes import drawable

MOST_POINTS = 400
"""Maximum number of points of one trainer."""


@dataclass(frozen=True)
class LossPoint:
    """``at_s``: seconds on the report's clock."""

    samples: int
    at_s: float
    loss: float


@dataclass(frozen=True)
class Loss:
    """One trainer's loss.

    Attributes
    ----------
    fragments
        One line for each fragment; samples that were repeated after a preemption appear twice.
    preempted
        Where fragments were preempted: samples reached, seconds on the report's clock.
    """

    fragments: tuple[tuple[LossPoint, ...], ...] = ()
    preempted: tuple[tuple[int, float], ...] = ()


def losses(history: RunHistory, progress: Iterable[ProgressRow], clock: Clock) -> dict[str, Loss]:
    """By trainer; only those values of the reported ``loss`` count that can be drawn."""
    lines: dict[tuple[int, str, int], list[LossPoint]] = defaultdict(list)
    for report in progress:
        value = report.metrics.get('loss')
        if isinstance(value, int | float) and drawable(value):
            key = report.run, report.trainer, report.fragment
            lines[key].append(
                LossPoint(report.samples, clock.of(report.run, report.at), float(value))
            )
    living = {run.id for run in history.runs if history.alive(run)}
    by_trainer: dict[str, list[list[LossPoint]]] = defaultdict(list)
    struck: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for fragment in history.fragments:
        if lines[fragment.key]:
            by_trainer[fragment.trainer].append(lines[fragment.key])
        if ending_of(fragment, fragment.run in living) == 'preempted':
            ended = clock.until[fragment.run] if fragment.ended_at is None else fragment.ended_at
            reached = (
                fragment.reached
                if fragment.reached is not None
                else fragment.seen_samples or fragment.from_samples
            )
            struck[fragment.trainer].append((reached, clock.of(fragment.run, ended)))
    return {
        name: Loss(_thinned(by_trainer[name]), tuple(struck[name]))
        for name in {t.name: None for t in history.trainers}
    }


def _thinned(fragments: Sequence[Sequence[LossPoint]]) -> tuple[tuple[LossPoint, ...], ...]:
    """Every n-th point, with the first and the last one of each fragment, and the extremes between
    these.
    """
    every = -(-sum(map(len, fragments)) // (MOST_POINTS // 2))
    if every <= 2:
        return tuple(tuple(points) for points in fragments)
    return tuple(tuple(_extremes(points, every)) for points in fragments)


def _extremes(points: Sequence[LossPoint], every: int) -> list[LossPoint]:
    chosen = {0, len(points) - 1}
    for start in range(0, len(points), every):
        part = range(start, min(start + every, len(points)))
        chosen |= {min(part, key=lambda i: points[i].loss), max(part, key=lambda i: points[i].loss)}
    return [points[i] for i in sorted(chosen)]
