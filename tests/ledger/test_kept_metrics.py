"""Metrics along the training that was kept: each position once, whatever was lost and repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hypothesis import strategies as st

from parsl_freetrain.ledger.kept_metrics import KeptMetrics, MetricPoint, began_in
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import (
    CheckpointRow,
    FragmentRow,
    ProgressRow,
    RunHistory,
    TrainerRow,
)
from tests.support.ledgers import demo_ledger
from tests.support.properties import holds_for

BEGUN = RunHistory(fragments=(FragmentRow(1, 't', 1, 0.0),))


@dataclass
class Training:
    """What a ledger says of a training, and what was kept of it."""

    runs: int = 1
    fragment: int = 1
    samples: int = 0
    saved: int = 0
    now: float = 0.0
    rows: list[tuple[int, ProgressRow]] = field(default_factory=list)
    kept: list[tuple[int, float]] = field(default_factory=list)
    history: RunHistory = field(default_factory=lambda: BEGUN)

    def report(self, step: int) -> None:
        self.samples += step
        self.now += 1
        value = float(len(self.rows))  # no two reports have the same
        row = ProgressRow(self.runs, 't', self.fragment, self.now, self.samples, 1.0, {'x': value})
        self.rows.append((len(self.rows) + 1, row))
        if self.kept and self.kept[-1][0] == self.samples:
            self.kept.pop()
        self.kept.append((self.samples, value))

    def save(self, _: int) -> None:
        self.saved = self.samples
        new = CheckpointRow(self.runs, 't', self.fragment, self.now, self.samples)
        self.history = replace(self.history, checkpoints=(*self.history.checkpoints, new))

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
        self._next()

    def _lose(self, samples: int) -> None:
        self.samples = samples
        self.kept = [point for point in self.kept if point[0] <= samples]

    def _next(self) -> None:
        self.fragment += 1
        new = FragmentRow(self.runs, 't', self.fragment, self.now, from_samples=self.samples)
        self.history = replace(self.history, fragments=(*self.history.fragments, new))


HAPPENS: list[Callable[[Training, int], None]] = [
    Training.report,
    Training.report,
    Training.save,
    Training.go_back,
    Training.preempt,
    Training.rescale,
    Training.again,
]


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
            found += metrics.take(training.rows[metrics.row :], training.history)
            if restarts and found:  # another process goes on
                metrics = KeptMetrics('t', 1, found[-1].mark)
    found += metrics.take(training.rows[metrics.row :], training.history)
    for point in metrics.rest():
        found.append(point)
    seen = [(point.samples, point.metrics['x']) for point in found]
    assert [samples for samples, _ in seen] == sorted({samples for samples, _ in seen})
    assert seen == training.kept


def test_only_what_has_changed_is_a_point() -> None:
    rows = [
        ProgressRow(1, 't', 1, float(i), 10 * i, None, {'loss': 1 / i, 'error': i // 3})
        for i in range(1, 7)
    ]
    history = RunHistory(
        fragments=(FragmentRow(1, 't', 1, 0.0),), checkpoints=(CheckpointRow(1, 't', 1, 9.0, 60),)
    )
    points = KeptMetrics('t', 1).take(enumerate(rows), history)
    errors = [(p.samples, p.metrics['error']) for p in points if 'error' in p.metrics]
    assert errors == [(10, 0.0), (30, 1.0), (60, 2.0)]
    assert [p.samples for p in points if 'loss' in p.metrics] == [10, 20, 30, 40, 50, 60]


def test_a_training_begins_where_the_trainer_had_no_samples() -> None:
    rows = [
        TrainerRow(run, 't', 0.0, {}, 100, first, 0, 'running', 0.0)
        for run, first in ((1, 0), (2, 40), (3, 0), (4, 30), (5, 60))
    ]
    history = RunHistory(trainers=tuple(rows))
    assert [began_in(history, 't', run) for run in range(1, 6)] == [1, 1, 3, 3, 3]


def test_a_ledger_is_followed_while_it_is_written(tmp_path: Path) -> None:
    with Reader(demo_ledger(tmp_path / 'l.db', seconds=40.0, runs=2)) as reader:
        metrics = KeptMetrics('cnn', 1)
        first = metrics.new(reader)
        assert metrics.new(reader) == []
        rows = reader.progress(trainer='cnn')
        assert metrics.row and len(first) <= len(rows)
        assert {p.run for p in first} == {1, 2}
        samples = [p.samples for p in first]
        assert samples == sorted(set(samples))
