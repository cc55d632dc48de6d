"""A ledger that is damaged, deleted or replaced while a run writes it: the run goes on."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.writer import Ledger


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    path.write_bytes(b'a disk that went mad ' * 5000)


def replace(path: Path) -> None:
    path.unlink()
    path.write_text('not a database')


@pytest.mark.parametrize('harm', [half, empty, overwrite, replace, Path.unlink])
def test_a_damaged_ledger_is_set_aside_and_a_new_one_has_what_matters(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / 'l.db'
    ledger = Ledger(path)
    ledger.begin_run('r0', at=1000.0, parsl_run_dir='runinfo/000', command='python train.py')
    ledger.trainers.submitted(name='a', at=1001, spec={'x': 1}, total_samples=64, samples=0)
    ledger.nodes.block_opened('b', at=1002, job_id='7', nodes=2, walltime_s=30.0, names=())
    ledger.nodes.joined('b/x', at=1003, block='b', name='x')
    ledger.nodes.joined('b/y', at=1003, block='b', name='y')
    ledger.nodes.left('b/x', at=1004, how='lost')
    for n in range(300):
        ledger.event(at=1004, kind='Before', detail={'n': n, 'text': 'x' * 200})
    ledger.commit()

    harm(path)
    ledger.event(at=1005, kind='After')
    ledger.nodes.left('b/y', at=1006, how='taken')
    ledger.commit()
    [warning] = [r.getMessage() for r in caplog.records if 'was damaged' in r.getMessage()]
    was_there = harm is not Path.unlink
    assert (tmp_path / 'l.db.damaged-1').exists() is was_there
    assert ('l.db.damaged-1' in warning) is was_there

    ledger.trainers.state('a', at=1007, state='done', why='')
    ledger.end_run('r0', at=1008, how='done')
    ledger.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert {p.name for p in tmp_path.iterdir()} <= {'l.db', 'l.db.damaged-1'}
    with Reader(path) as reader:
        history = reader.history()
        assert 'After' in {event['kind'] for event in reader.events()}
    assert [(run.name, run.how) for run in history.runs] == [('r0', 'done')]
    assert [(t.name, t.total_samples, t.state) for t in history.trainers] == [('a', 64, 'done')]
    assert {node.name: node.left_at for node in history.nodes} == {'x': 1004, 'y': 1006}
    assert [block.job_id for block in history.blocks] == ['7']


def test_a_ledger_that_can_be_read_in_part_keeps_earlier_runs(tmp_path: Path) -> None:
    path = tmp_path / 'l.db'
    for run, at in (('r0', 1000.0), ('r1', 2000.0)):
        ledger = Ledger(path)
        ledger.begin_run(run, at=at, parsl_run_dir='', command='')
        ledger.trainers.submitted(name=run, at=at, spec={}, total_samples=1, samples=0)
        if run == 'r0':
            ledger.close()
    ledger.commit()
    path.unlink()  # the open file can still be read
    ledger.event(at=2001, kind='After')
    ledger.close()
    with Reader(path) as reader:
        history = reader.history()
    assert [run.name for run in history.runs] == ['r0', 'r1']
    assert [trainer.name for trainer in history.trainers] == ['r0', 'r1']


def test_where_no_new_file_can_be_made_the_rows_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / 'folder'
    ledger = Ledger(folder / 'l.db')
    ledger.begin_run('r0', at=1000.0, parsl_run_dir='', command='')
    (folder / 'l.db').unlink()
    folder.rename(tmp_path / 'elsewhere')
    folder.write_text('in the way')
    ledger.event(at=1001, kind='Waits')
    ledger.commit()
    ledger.commit()
    assert len(caplog.records) == 1 and 'kept in memory' in caplog.text
    folder.unlink()
    ledger.commit()
    ledger.close()
    with Reader(folder / 'l.db') as reader:
        assert [event['kind'] for event in reader.events()] == ['Waits']


def test_a_row_that_cannot_be_written_does_not_keep_others_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / 'l.db'
    ledger = Ledger(path)
    ledger.begin_run('r0', at=1000.0, parsl_run_dir='', command='')
    for _ in range(2):
        ledger.trainers.submitted(name='a', at=1001, spec={}, total_samples=2**70, samples=0)
    ledger.event(at=1002, kind='Kept')
    ledger.close()
    assert 'leaves out' in caplog.text
    with Reader(path) as reader:
        assert [event['kind'] for event in reader.events()] == ['Kept']


def test_a_closed_connection_is_no_traceback(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / 'l.db')
    ledger.begin_run('r0', at=1000.0, parsl_run_dir='', command='')
    ledger.event(at=1001, kind='Lost')
    ledger._connection.close()
    ledger.commit()
    with pytest.raises(sqlite3.ProgrammingError):
        ledger._connection.execute('SELECT 1')
