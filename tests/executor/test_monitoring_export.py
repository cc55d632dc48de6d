"""The ledger beside the tables of Parsl's monitoring."""

import sqlite3
from contextlib import closing
from pathlib import Path

import parsl
import pytest
from parsl.config import Config

from parsl_freetrain.app import freetrain_app
from parsl_freetrain.executor import FreeTrainExecutor
from parsl_freetrain.executor.ledger_exports import MonitoringExport, database_of
from parsl_freetrain.executor.settings import Recording
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
    assert database_of('sqlite:////x/m.db') == Path('/x/m.db')
    assert database_of(None) is None and database_of('postgresql://host/db') is None
    export = MonitoringExport()
    export.start('postgresql://host/db', tmp_path / 'l.db', 'r')
    export.stop()


def test_parsls_monitoring_has_our_blocks_and_fragments(tmp_path: Path) -> None:
    pytest.importorskip(
        'sqlalchemy', reason="needs Parsl's monitoring: pip install 'parsl[monitoring]'"
    )
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
        assert (
            db.execute(
                "SELECT count(*) FROM block WHERE run_id = ? AND status = 'RUNNING'", (run,)
            ).fetchone()[0]
            >= 1
        )
        fragments = db.execute(
            'SELECT f.trainer, f.ending, t.task_func_name FROM freetrain_fragments f JOIN task t '
            'ON t.run_id = f.run_id AND t.task_id = f.task_id WHERE f.run_id = ?',
            (run,),
        ).fetchall()
    assert fragments == [('fit', 'finished', 'fragment_task')]
    # A logger of the executor's has its metrics, too.
    assert logger.states == ['finished'] and logger.opened[0].trainer == 'fit'
    assert logger.points[-1][1] == 192 and logger.points[-1][2]
