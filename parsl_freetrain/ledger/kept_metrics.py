"""The metrics of a trainer along the training that was kept: each position once, although fragments
were preempted and repeated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import CheckpointRow, ProgressRow, RunHistory


@dataclass(frozen=True)
class MetricPoint:
    """Metrics at a number of samples.

    Attributes
    ----------
    run, at
        When they were reported: number of the run, epoch seconds.
    metrics
        Those that differ from the point before.
    mark
        Where to go on from in another process: samples, and the row of the ledger.
    """

    samples: int
    run: int
    at: float
    metrics: dict[str, float]
    mark: tuple[int, int]


def began_in(history: RunHistory, trainer: str, run: int) -> int:
    """The run in which the training that run number ``run`` goes on with began at 0 samples."""
    began = run
    for row in reversed(history.trainers):
        if row.name == trainer and row.run <= run:
            began = row.run
            if row.first_samples == 0:
                break
    return began


class KeptMetrics:
    """The metrics of one trainer, from its progress reports as these come in.

    A point counts when a checkpoint has it behind it. What was trained and lost never appears.

    Parameters
    ----------
    began
        The number of the run to begin with, from :func:`began_in`.
    mark
        That of the last point which is known already.

    Attributes
    ----------
    row
        The row of the last report that was taken.
    """

    def __init__(self, trainer: str, began: int, mark: tuple[int, int] = (-1, 0)) -> None:
        self.trainer, self.began, self.row = trainer, began, 0
        self._mark = mark
        self._last: ProgressRow | None = None
        self._pending: deque[tuple[int, ProgressRow]] = deque()
        self._values: dict[str, float] = {}

    def new(self, reader: Reader) -> list[MetricPoint]:
        """The points of a ledger that count since the last call."""
        # Progress first: what it belongs to is then in the history.
        rows = reader.progress_after(self.row, self.trainer, self.began)
        return self.take(rows, reader.history())

    def take(
        self, rows: Iterable[tuple[int, ProgressRow]], history: RunHistory
    ) -> list[MetricPoint]:
        """The points that count now, in order of samples, with these further reports."""
        own = [c for c in history.checkpoints if c.trainer == self.trainer and c.run >= self.began]
        fragments = [f for f in history.fragments if f.trainer == self.trainer]
        starts = {f.key: f.from_samples for f in fragments}
        points: list[MetricPoint] = []
        for self.row, report in rows:
            start = starts.get(report.key, 0)
            self._take(report, start, own)
        if self._last is not None and fragments[-1].key != self._last.key:
            self._go_back(fragments[-1].from_samples)  # it has not reported yet
        self._settle(max((c.samples for c in own), default=0), points)
        return points

    def rest(self) -> list[MetricPoint]:
        """The points behind the last checkpoint, which may still be lost."""
        values = dict(self._values)
        points = (_point(number, report, values) for number, report in self._pending)
        return [point for point in points if point.metrics and point.mark > self._mark]

    def _take(self, row: ProgressRow, start: int, own: Sequence[CheckpointRow]) -> None:
        last, self._last = self._last, row
        if last is None or last.key != row.key:
            self._go_back(start)
            before_it = start
        else:
            before_it = last.samples
        if row.samples < before_it:  # numbers were not finite
            before = (c.samples for c in own if c.at <= row.at and c.samples <= row.samples)
            self._go_back(max(before, default=0))
        if self._pending and self._pending[-1][1].samples == row.samples:
            self._pending.pop()  # the later one has its metrics too
        self._pending.append((self.row, row))

    def _go_back(self, samples: int) -> None:
        """Training went on from here; what came after it is lost."""
        while self._pending and self._pending[-1][1].samples > samples:
            self._pending.pop()

    def _settle(self, samples: int, points: list[MetricPoint]) -> None:
        """What came up to here is kept."""
        while self._pending and self._pending[0][1].samples <= samples:
            point = _point(*self._pending.popleft(), self._values)
            if point.metrics and point.mark > self._mark:
                self._mark = point.mark
                points.append(point)


def _point(number: int, report: ProgressRow, values: dict[str, float]) -> MetricPoint:
    """The point of a report. ``values``: the metrics before it; it is kept up to date."""
    changed = {
        name: float(value)
        for name, value in report.metrics.items()
        if isinstance(value, int | float) and values.get(name) != value
    }
    values.update(changed)
    return MetricPoint(report.samples, report.run, report.at, changed, (report.samples, number))
