"""The ledger beside the tables of Parsl's monitoring, and for loggers: all of it, once."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import parsl
import pytest
from parsl.config import Config

from parsl_freetrain.app import freetrain_app
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Checkpoint, Trainer
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.ledger_exports import MetricExport, MonitoringExport
from parsl_freetrain.executor.settings import Recording
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.sites.local import LocalSite
from parsl_freetrain.sites.provider import BackfillProvider
from tests.support.journals import demo_journal
from tests.support.loggers import Recorder
from tests.support.training import fit


def counts(database: Path, table: str) -> dict[str, int]:
    with closing(sqlite3.connect(database)) as db:
        return dict(db.execute(f'SELECT run_id, count(*) FROM freetrain_{table} GROUP BY run_id'))


def test_what_is_copied_in_the_end_is_complete_and_a_locked_database_harms_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('parsl_freetrain.journal.tables.BUSY_S', 0.05)
    ledger, database = demo_journal(tmp_path / 'l.db', seconds=20.0), tmp_path / 'monitoring.db'
    export = MonitoringExport(period_s=0.05)
    with closing(sqlite3.connect(database, isolation_level=None)) as db:
        db.execute('BEGIN EXCLUSIVE')
        export.start(f'sqlite:///{database}', ledger, 'run-0')
        export.start(f'sqlite:///{database}', ledger, 'run-0')  # once is enough
        while 'could not be copied' not in caplog.text:
            pass
        db.execute('ROLLBACK')
    export.stop()
    assert counts(database, 'trainers') == {'run-0': 2}
    assert caplog.text.count('could not be copied') == 1


def test_only_sqlite_files_are_copied_into(tmp_path: Path) -> None:
    export = MonitoringExport()
    export.start('postgresql://host/db', tmp_path / 'l.db', 'r')
    export.start(None, tmp_path / 'l.db', 'r')
    assert export._thread is None
    export.stop()


def test_parsls_monitoring_has_our_blocks_and_fragments(tmp_path: Path) -> None:
    pytest.importorskip('sqlalchemy', reason="pip install 'parsl[monitoring]'")
    from parsl.monitoring import MonitoringHub

    logger = Recorder()
    executor = FreeTrainExecutor(
        provider=BackfillProvider(site=LocalSite(nodes=1, poll_s=0.2), min_hole_s=1.0),
        checkpoint_dir=str(tmp_path / 'checkpoints'),
        max_workers_per_node=0,
        recording=Recording(loggers=[logger]),
    )
    hub = MonitoringHub(resource_monitoring_interval=1)
    with parsl.load(
        Config(
            executors=[executor], strategy='none', run_dir=str(tmp_path / 'runinfo'), monitoring=hub
        )
    ) as dfk:
        assert freetrain_app(max_nodes=1, total_epochs=2)(fit)().result().samples == 192
        run = dfk.run_id
    with closing(sqlite3.connect(tmp_path / 'runinfo' / 'monitoring.db')) as db:
        count = "SELECT count(*) FROM block WHERE run_id = ? AND status = 'RUNNING'"
        assert db.execute(count, (run,)).fetchone()[0] >= 1
        fragments = db.execute(
            'SELECT f.trainer, f.ending, t.task_func_name FROM freetrain_fragments f JOIN task t '
            'ON t.run_id = f.run_id AND t.task_id = f.task_id WHERE f.run_id = ?',
            (run,),
        ).fetchall()
    assert fragments == [('fit', 'finished', 'fragment_task')]
    # A logger of the executor's has its metrics, too.
    assert logger.states == ['finished'] and logger.opened[0].trainer == 'fit'
    assert logger.points[-1][1] == 192 and logger.points[-1][2]


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
    exports = MetricExport(period_s=0.01)
    exports.start([logger], path, run)
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


def test_logger_that_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, logger = tmp_path / 'l.db', Recorder(fails=3)
    one_run(path, 'aaaaaaaaaaaa', 0, reached=60, saved=60)
    export(path, 'aaaaaaaaaaaa', logger, until=6)
    assert [samples for _, samples, _ in logger.points] == list(range(10, 61, 10))
    assert caplog.text.count('Recorder cannot log trainer') == 1
    assert 'ConnectionError: no server' in caplog.text
    assert logger.states == ['interrupted'] * 4
