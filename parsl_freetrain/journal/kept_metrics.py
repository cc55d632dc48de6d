"""The metrics of a trainer along the training that was kept: each position once."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from parsl_freetrain.core.model.events import FragmentProgressed
from parsl_freetrain.core.model.state import Fragment, History
from parsl_freetrain.core.model.types import Checkpoint


class MetricPoint(NamedTuple):
    samples: int
    run: int  #: run, at: when they were reported: number of the run, epoch seconds
    at: float
    metrics: dict[str, float]  #: those that differ from the point before
    #: Where to go on from in another process: samples, and the number of the report.
    mark: tuple[int, int]


class _Report(NamedTuple):
    number: int
    fragment: Fragment
    event: FragmentProgressed

    @property
    def samples(self) -> int:
        return self.event.samples


def main_metric(names: Iterable[str]) -> str:
    """The one that is shown where there is room for one: a loss, or the first reported; or ''."""
    known = [*names]
    losses = [name for name in known if 'loss' in name.lower()]
    return 'loss' if 'loss' in losses else next(iter([*losses, *known]), '')


def began_in(history: History, trainer: str, run: int) -> int:
    """The run in which the training that run number ``run`` goes on with began at 0 samples."""
    began = run
    for one in reversed(history.runs):
        training = one.trainers.get(trainer)
        if training is not None and one.id <= run:
            began = one.id
            if training.submitted.samples == 0:
                break
    return began


class KeptMetrics:
    """A trainer's metrics from run ``began`` and ``mark`` on, once a checkpoint is behind them."""

    def __init__(self, trainer: str, began: int, mark: tuple[int, int] = (-1, 0)) -> None:
        self.trainer, self.began = trainer, began
        self._mark = mark
        self._number = 0  # of the last report that was taken
        self._fragment = self._in_it = 0  # the fragment of the next report, and its place in it
        self._last: _Report | None = None
        self._pending: deque[_Report] = deque()
        self._values: dict[str, float] = {}

    def new(self, history: History) -> list[MetricPoint]:
        """The points that count since the last call, in order of samples."""
        fragments = [
            fragment
            for run in history.runs
            if run.id >= self.began and self.trainer in run.trainers
            for fragment in run.trainers[self.trainer].fragments
        ]
        own = [saved for fragment in fragments for saved in fragment.checkpoints]
        points: list[MetricPoint] = []
        for report in self._reports(fragments):
            self._take(report, own)
        if self._last is not None and fragments[-1] is not self._last.fragment:
            self._go_back(fragments[-1].launched.samples)  # it has not reported yet
        self._settle(max((saved.samples for saved in own), default=0), points)
        return points

    def rest(self) -> list[MetricPoint]:
        values = dict(self._values)
        points = (_point(report, values) for report in self._pending)
        return [point for point in points if point.metrics and point.mark > self._mark]

    def _reports(self, fragments: Sequence[Fragment]) -> Iterator[_Report]:
        while self._fragment < len(fragments):
            fragment = fragments[self._fragment]
            for event in fragment.progress[self._in_it :]:
                self._number, self._in_it = self._number + 1, self._in_it + 1
                yield _Report(self._number, fragment, event)
            if self._fragment == len(fragments) - 1:
                return
            self._fragment, self._in_it = self._fragment + 1, 0

    def _take(self, report: _Report, own: Sequence[Checkpoint]) -> None:
        last, self._last = self._last, report
        if last is None or last.fragment is not report.fragment:
            before_it = report.fragment.launched.samples
            self._go_back(before_it)
        else:
            before_it = last.samples
        if report.samples < before_it:  # numbers were not finite
            at = report.event.at
            before = (c.samples for c in own if c.at <= at and c.samples <= report.samples)
            self._go_back(max(before, default=0))
        if self._pending and self._pending[-1].samples == report.samples:
            self._pending.pop()  # the later one has its metrics too
        self._pending.append(report)

    def _go_back(self, samples: int) -> None:
        """Training went on from here; what came after it is lost."""
        while self._pending and self._pending[-1].samples > samples:
            self._pending.pop()

    def _settle(self, samples: int, points: list[MetricPoint]) -> None:
        while self._pending and self._pending[0].samples <= samples:
            point = _point(self._pending.popleft(), self._values)
            if point.metrics and point.mark > self._mark:
                self._mark = point.mark
                points.append(point)


def _point(report: _Report, values: dict[str, float]) -> MetricPoint:
    numbers = {k: v for k, v in report.event.metrics.items() if isinstance(v, int | float)}
    changed = {k: float(v) for k, v in numbers.items() if values.get(k) != v}
    values.update(changed)
    run, at, samples = report.fragment.run, report.event.at, report.samples
    return MetricPoint(samples, run, at, changed, (samples, report.number))
