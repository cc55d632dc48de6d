"""Loggers get what the ledger has, once, from the submitting process."""

import time
from pathlib import Path
from typing import Any

import pytest

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Checkpoint, Trainer
from parsl_freetrain.executor.ledger_exports import MetricExport
from parsl_freetrain.journal.append import JournalWriter
from tests.support.loggers import Recorder


def one_run(path: Path, run: str, start: int, reached: int, saved: int, state: str = '') -> None:
    """A run that reports every 10 samples."""
    journal, at = JournalWriter(path), time.time()
    journal.begin_run(ev.RunBegan(at, run))
    trainer = Trainer('a net', 1, 2, 100, sizes=(1, 2))
    for event in (
        ev.TrainerSubmitted(at, trainer, start, mode='reproducible'),
        ev.FragmentLaunched(at, 'a net', 1, ('n',), None, start),
        *(
            ev.FragmentProgressed(at, 'a net', 1, samples, 1.0, {'loss': 1 / samples})
            for samples in range(start + 10, reached + 1, 10)
        ),
        ev.CheckpointSaved(at, Checkpoint('a net', '', saved, 1, at=at)),
        *([ev.Decided(at, (ev.EndTrainer('a net', state),))] if state else []),
        ev.RunEnded(at, 'shutdown'),
    ):
        journal.take(event)


def export(path: Path, run: str, logger: Any, until: int = 0) -> None:
    exports = MetricExport([logger], period_s=0.01)
    exports.start(path, run)
    while len(logger.points) < until:
        pass
    exports.stop()


def test_runs_that_go_on_are_one_training_without_repeats(tmp_path: Path) -> None:
    path, logger = tmp_path / 'l.db', Recorder()
    one_run(path, 'aaaaaaaaaaaa', 0, reached=60, saved=40)
    export(path, 'aaaaaaaaaaaa', logger)
    one_run(path, 'bbbbbbbbbbbb', 40, reached=100, saved=100, state='finished')
    export(path, 'bbbbbbbbbbbb', logger)
    assert logger.points == [('a net', s, {'loss': 1 / s}) for s in range(10, 101, 10)]
    assert logger.states == ['interrupted', 'finished']
    first, second = logger.opened
    assert first.id == second.id == 'a-net-aaaaaaaa'
    assert (first.samples, second.samples) == (-1, 40)
    assert first.settings == {
        'min_nodes': 1, 'max_nodes': 2, 'mode': 'reproducible', 'total_samples': 100
    }  # fmt: skip
    assert (path.parent / 'l.db.Recorder.json').stat().st_mode & 0o077 == 0
    one_run(path, 'cccccccccccc', 0, reached=20, saved=20)  # it begins anew
    export(path, 'cccccccccccc', logger)
    assert (logger.opened[2].id, logger.opened[2].samples) == ('a-net-cccccccc', -1)
    assert [samples for _, samples, _ in logger.points[10:]] == [10, 20]


def test_a_logger_that_fails_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, logger = tmp_path / 'l.db', Recorder(fails=3)
    one_run(path, 'aaaaaaaaaaaa', 0, reached=60, saved=60)
    export(path, 'aaaaaaaaaaaa', logger, until=6)
    assert [samples for _, samples, _ in logger.points] == list(range(10, 61, 10))
    assert caplog.text.count('Recorder cannot log trainer') == 1
    assert 'ConnectionError: no server' in caplog.text
    assert logger.states == ['interrupted'] * 4
