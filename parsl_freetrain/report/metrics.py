"""Every metric of every trainer over the training that was kept, and all losses, for charts."""

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History
from parsl_freetrain.journal.kept_metrics import KeptMetrics, began_in, main_metric
from parsl_freetrain.report.svg import drawable, extremes
from parsl_freetrain.report.timeline import Clock, ending_of


@dataclass(frozen=True)
class CurvePoint:
    samples: int
    epochs: float | None  #: None if the trainer's total is not in epochs
    seconds: float  #: on the report's clock
    value: float


@dataclass(frozen=True)
class Losses:
    name: str = 'loss'  #: or what the trainer has reported first in its place
    #: One line for each fragment; samples that were repeated after a preemption appear twice.
    fragments: tuple[tuple[CurvePoint, ...], ...] = ()
    #: Where fragments were preempted: samples reached, seconds on the report's clock.
    preempted: tuple[tuple[int, float], ...] = ()


def losses(history: History, clock: Clock) -> dict[str, Losses]:
    """By trainer; only those values of its :func:`main_metric` count that can be drawn."""
    lines: dict[str, list[list[CurvePoint]]] = {one.name: [] for one in history.trainings}
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
            CurvePoint(report.samples, None, clock.of(fragment.run, report.at), float(value))
            for report in fragment.progress
            if isinstance(value := report.metrics.get(name), int | float) and drawable(value)
        ]
        if line:
            lines[fragment.trainer].append(line)
        if ending_of(fragment, fragment.run in living) == 'preempted':
            ended = clock.until[fragment.run] if fragment.ended_at is None else fragment.ended_at
            reached = fragment.reached
            if reached is None:
                reached = (
                    fragment.launched.samples if fragment.seen is None else fragment.seen.samples
                )
            struck[fragment.trainer].append((reached, clock.of(fragment.run, ended)))
    found = {}
    for trainer, mine in lines.items():
        every = -(-sum(map(len, mine)) // (MOST_POINTS // 2))
        thin = tuple(extremes(points, every, lambda point: point.value) for points in mine)
        found[trainer] = Losses(names[trainer], thin, tuple(struck[trainer]))
    return found


AXES = ('samples', 'epochs', 'seconds')
MOST_POINTS = 400  # maximum number of points of one trainer in a chart
MOST_TRAINERS, MOST_METRICS = 8, 12  # maximum numbers in :func:`metrics_document`


Curves = dict[str, dict[str, tuple[CurvePoint, ...]]]  # by metric and trainer, in order of samples


@dataclass(frozen=True)
class MetricView:
    """An axis of :data:`AXES`, and the share of earlier values in the mean, 0 to below 1."""

    axis: str = 'samples'
    smooth: float = 0.0

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise BadInput(f'--axis is {self.axis!r}; it must be one of {", ".join(AXES)}.')
        if not 0 <= self.smooth < 1:
            raise BadInput(f'--smooth is {self.smooth:g}; it must be from 0 to below 1.')

    def line(self, curve: Sequence[CurvePoint]) -> list[tuple[float, float]]:
        at = ((getattr(point, self.axis), point.value) for point in curve)
        return [(x, value) for x, value in at if x is not None]


def smoothed(line: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
    """The exponential moving average over the points of a line, unbiased at the start."""
    mean = share = 0.0
    found = []
    for x, value in line:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        found.append((x, mean / share))
    return found


def metric_curves(
    history: History, clock: Clock, trainers: Collection[str] | None = None
) -> Curves:
    """The thinned finite values; of a trainer that began anew, the newest training."""
    found: dict[str, dict[str, list[CurvePoint]]] = {}
    for name, newest in {one.name: one for one in history.trainings}.items():
        if trainers is not None and name not in trainers:
            continue
        total, epochs = newest.trainer.total_samples, newest.submitted.total_epochs
        in_epoch = total / epochs if total and epochs else None
        kept = KeptMetrics(name, began_in(history, name, newest.run))
        for point in [*kept.new(history), *kept.rest()]:
            at = clock.of(point.run, point.at)
            done = point.samples / in_epoch if in_epoch else None
            for metric, value in point.metrics.items():
                if drawable(value):
                    curve = found.setdefault(metric, {}).setdefault(name, [])
                    curve.append(CurvePoint(point.samples, done, at, value))
    sorted_ = {metric: found[metric].items() for metric in sorted(found)}
    return {metric: {k: thinned(curve) for k, curve in of} for metric, of in sorted_.items()}


def thinned(curve: Sequence[CurvePoint], most: int = MOST_POINTS) -> tuple[CurvePoint, ...]:
    """At most about ``most`` points: the first, the last, and the extremes between."""
    return extremes(curve, -(-len(curve) // (most // 2)), lambda point: point.value)


def metrics_document(history: History, trainers: Sequence[str], now: float) -> dict[str, Any]:
    """By metric and trainer (the first ones) [samples, epochs or null, seconds, value]s."""
    found = metric_curves(history, Clock(history, now), trainers[:MOST_TRAINERS])
    return {
        metric: {
            name: [astuple(point) for point in thinned(curve, MOST_POINTS // 2)]
            for name, curve in found[metric].items()
        }
        for metric in list(found)[:MOST_METRICS]
    }
