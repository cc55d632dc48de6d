"""Every metric of every trainer over the training that was kept, for charts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.ledger.clock import Clock
from parsl_freetrain.ledger.kept_metrics import KeptMetrics, MetricPoint, began_in
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import ProgressRow, RunHistory, TrainerRow
from parsl_freetrain.report.axes import drawable

AXES = ('samples', 'epochs', 'seconds')
MOST_POINTS = 400
"""Maximum number of points of one trainer in a chart."""

MOST_TRAINERS, MOST_METRICS = 8, 12
"""Maximum numbers of trainers and metrics of :func:`metrics_document`."""


@dataclass(frozen=True)
class CurvePoint:
    """A value of a metric.

    Attributes
    ----------
    epochs
        None if the trainer's total is not in epochs.
    seconds
        On the report's clock.
    """

    samples: int
    epochs: float | None
    seconds: float
    value: float


Curves = dict[str, dict[str, tuple[CurvePoint, ...]]]
"""By metric and trainer, in order of samples."""


@dataclass(frozen=True)
class MetricView:
    """How metrics are drawn.

    Parameters
    ----------
    axis
        One of :data:`AXES`.
    smooth
        Weight of the mean of the values before, 0 (not smoothed) to below 1.

    Raises
    ------
    BadInput
        If one of them is something else.
    """

    axis: str = 'samples'
    smooth: float = 0.0

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise BadInput(f'--axis is {self.axis!r}; it must be one of {", ".join(AXES)}.')
        if not 0 <= self.smooth < 1:
            raise BadInput(f'--smooth is {self.smooth:g}; it must be from 0 to below 1.')

    def line(self, curve: Sequence[CurvePoint]) -> list[tuple[float, float]]:
        """The points of a curve on this axis."""
        at = ((getattr(point, self.axis), point.value) for point in curve)
        return [(x, value) for x, value in at if x is not None]


def smoothed(line: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
    """The exponential moving average over the points of a line, in which the first values do not
    count more than others.
    """
    mean = share = 0.0
    found = []
    for x, value in line:
        mean = weight * mean + (1 - weight) * value
        share = weight * share + (1 - weight)
        found.append((x, mean / share))
    return found


def metric_curves(history: RunHistory, progress: Iterable[ProgressRow], clock: Clock) -> Curves:
    """The curves of all trainers of some runs, thinned. Only finite values count; of a trainer that
    began anew, the newest training.
    """
    newest = {row.name: row for row in history.trainers}
    first = min((run.id for run in history.runs), default=0)
    kept = {
        name: KeptMetrics(name, max(first, began_in(history, name, row.run)))
        for name, row in newest.items()
    }
    reports: dict[str, list[tuple[int, ProgressRow]]] = {name: [] for name in newest}
    for number, report in enumerate(progress):
        if report.trainer in kept and report.run >= kept[report.trainer].began:
            reports[report.trainer].append((number, report))
    points = {
        name: [*metrics.take(reports[name], history), *metrics.rest()]
        for name, metrics in kept.items()
    }
    return curves_of(points, newest, clock)


def curves_of(
    points: Mapping[str, Iterable[MetricPoint]], trainers: Mapping[str, TrainerRow], clock: Clock
) -> Curves:
    """The curves of these points, by trainer."""
    found: dict[str, dict[str, list[CurvePoint]]] = {}
    for name, own in points.items():
        row = trainers[name]
        epochs = row.spec.get('total_epochs')
        in_epoch = row.total_samples / epochs if row.total_samples and epochs else None
        for point in own:
            at = clock.of(point.run, point.at)
            done = point.samples / in_epoch if in_epoch else None
            for metric, value in point.metrics.items():
                if drawable(value):
                    curve = found.setdefault(metric, {}).setdefault(name, [])
                    curve.append(CurvePoint(point.samples, done, at, value))
    return {
        metric: {name: thinned(curve) for name, curve in found[metric].items()}
        for metric in sorted(found)
    }


def thinned(curve: Sequence[CurvePoint], most: int = MOST_POINTS) -> tuple[CurvePoint, ...]:
    """At most about ``most`` points: the first, the last, and the extremes between."""
    every = -(-len(curve) // (most // 2))
    if every <= 2:
        return tuple(curve)
    chosen = {0, len(curve) - 1}
    for start in range(0, len(curve), every):
        part = range(start, min(start + every, len(curve)))
        chosen |= {min(part, key=lambda i: curve[i].value), max(part, key=lambda i: curve[i].value)}
    return tuple(curve[i] for i in sorted(chosen))


def metrics_document(reader: Reader, trainers: Sequence[str], now: float) -> dict[str, Any]:
    """The metrics of the first of these trainers, for ``freetrain status``: by metric and trainer,
    points as [samples, epochs or null, seconds, value].
    """
    history = reader.history()
    found = metric_curves(history, reader.progress(), Clock(history, now))
    shown = set(trainers[:MOST_TRAINERS])
    document = {
        metric: {
            name: [astuple(point) for point in thinned(curve, MOST_POINTS // 2)]
            for name, curve in curves.items()
            if name in shown
        }
        for metric, curves in found.items()
    }
    return dict([item for item in document.items() if item[1]][:MOST_METRICS])
