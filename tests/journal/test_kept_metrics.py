"""Metrics along the training that was kept: each position once, whatever was lost and repeated."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import strategies as st

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.fold import fold
from parsl_freetrain.core.model.state import History
from parsl_freetrain.core.model.types import Checkpoint, Trainer
from parsl_freetrain.journal.kept_metrics import KeptMetrics, MetricPoint, began_in
from tests.support.properties import holds_for


def begin(history: History, run: str, samples: int) -> None:
    submitted = ev.TrainerSubmitted(0.0, Trainer('t', 1, 1), samples)
    fold(history, (ev.RunBegan(0.0, run), submitted))


@dataclass
class Training:
    """What a journal says of a training, and what was kept of it."""

    runs: int = 0
    fragment: int = 0
    samples: int = 0
    saved: int = 0
    now: float = 0.0
    reports: int = 0
    kept: list[tuple[int, float]] = field(default_factory=list)
    history: History = field(default_factory=History)

    def __post_init__(self) -> None:
        self.again(0)

    def report(self, step: int) -> None:
        self.samples += step
        self.now += 1
        self.reports += 1  # no two reports have the same value
        metrics = {'x': float(self.reports)}
        report = ev.FragmentProgressed(self.now, 't', self.fragment, self.samples, 1.0, metrics)
        fold(self.history, (report,))
        if self.kept and self.kept[-1][0] == self.samples:
            self.kept.pop()
        self.kept.append((self.samples, float(self.reports)))

    def save(self, _: int) -> None:
        self.saved = self.samples
        saved = Checkpoint('t', '', self.samples, self.fragment, at=self.now)
        fold(self.history, (ev.CheckpointSaved(self.now, saved),))

    def go_back(self, _: int) -> None:
        """Within a fragment, since numbers were not finite."""
        self._lose(self.saved)
        self.report(1)

    def preempt(self, _: int) -> None:
        self._lose(self.saved)
        self._next()

    def rescale(self, _: int) -> None:
        """The next fragment goes on from memory."""
        self._next()

    def again(self, _: int) -> None:
        """The submitting process was killed, and the workflow started again."""
        self._lose(self.saved)
        self.runs, self.fragment = self.runs + 1, 0
        begin(self.history, f'r{self.runs}', self.samples)
        self._next()

    def _lose(self, samples: int) -> None:
        self.samples = samples
        self.kept = [point for point in self.kept if point[0] <= samples]

    def _next(self) -> None:
        self.fragment += 1
        new = ev.FragmentLaunched(self.now, 't', self.fragment, ('n',), None, self.samples)
        fold(self.history, (new,))


HAPPENS: list[Callable[[Training, int], None]] = [Training.report, Training.report, Training.save]
HAPPENS += [Training.go_back, Training.preempt, Training.rescale, Training.again]


@holds_for(
    st.lists(st.tuples(st.sampled_from(HAPPENS), st.integers(1, 9), st.booleans()), max_size=60),
    st.booleans(),
    tries=150,
)
def test_each_position_of_the_kept_training_appears_once(
    happens: list[tuple[Callable[[Training, int], None], int, bool]], restarts: bool
) -> None:
    training, metrics = Training(), KeptMetrics('t', 1)
    found: list[MetricPoint] = []
    for what, step, looks in happens:
        what(training, step)
        if looks:
            found += metrics.new(training.history)
            if restarts and found:  # another process goes on
                metrics = KeptMetrics('t', 1, found[-1].mark)
    found += metrics.new(training.history)
    for point in metrics.rest():
        found.append(point)
    seen = [(point.samples, point.metrics['x']) for point in found]
    assert [samples for samples, _ in seen] == sorted({samples for samples, _ in seen})
    assert seen == training.kept


def test_only_what_has_changed_is_a_point() -> None:
    history = History()
    begin(history, 'r', 0)
    fold(history, (ev.FragmentLaunched(0.0, 't', 1, ('n',), None, 0),))
    for i in range(1, 7):
        metrics = {'loss': 1 / i, 'error': i // 3}
        fold(history, (ev.FragmentProgressed(float(i), 't', 1, 10 * i, None, metrics),))
    fold(history, (ev.CheckpointSaved(9.0, Checkpoint('t', '', 60, 1, at=9.0)),))
    points = KeptMetrics('t', 1).new(history)
    errors = [(p.samples, p.metrics['error']) for p in points if 'error' in p.metrics]
    assert errors == [(10, 0.0), (30, 1.0), (60, 2.0)]
    assert [p.samples for p in points if 'loss' in p.metrics] == [10, 20, 30, 40, 50, 60]


def test_a_training_begins_where_the_trainer_had_no_samples() -> None:
    history = History()
    for run, first in ((1, 0), (2, 40), (3, 0), (4, 30), (5, 60)):
        begin(history, f'r{run}', first)
    assert [began_in(history, 't', run) for run in range(1, 6)] == [1, 1, 3, 3, 3]
