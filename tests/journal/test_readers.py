"""A journal as tables, for those who ask in SQL; and what earlier runs have used of a budget."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest

from parsl_freetrain.cli.main import main
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Charge, Trainer
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.journal.tables import TABLES, write_sqlite
from parsl_freetrain.journal.usage import charged, used_node_s
from tests.support.journals import demo_journal


def test_a_file_for_sql_or_for_pandas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo_journal(tmp_path / 'ledger.journal', seconds=20.0, runs=2)
    given = ('export', '--ledger', str(tmp_path))
    assert main([*given]) == 2
    assert 'Say where to: --sqlite FILE or --parquet FOLDER.' in capsys.readouterr().err
    assert main([*given, '--parquet', str(tmp_path / 'tables'), '--run', 'run-1']) == 0
    assert capsys.readouterr().out == f'Wrote {tmp_path}/tables.\n'
    trainers = pd.read_parquet(tmp_path / 'tables' / 'trainers.parquet')
    assert list(trainers['name']) == ['cnn', 'mlp'] and set(trainers['run_id']) == {'run-1'}
    assert main([*given, '--sqlite', str(tmp_path / 'nowhere' / 'x.db')]) == 2
    assert 'cannot be written' in capsys.readouterr().err


def test_runs_are_written_beside_others_and_again_when_they_changed(tmp_path: Path) -> None:
    path, database = demo_journal(tmp_path / 'l', seconds=20.0, runs=2), tmp_path / 'some.db'
    journal = Journal(path)
    with closing(sqlite3.connect(database)) as db:
        db.execute('CREATE TABLE task (task_id INTEGER)')
        db.commit()
        for run in ('run-1', 'run-1', 'run-0'):
            write_sqlite(journal.history(run), database, 'our_')

        def counts(table: str) -> dict[str, int]:
            return dict(db.execute(f'SELECT run_id, count(*) FROM our_{table} GROUP BY run_id'))

        assert all(set(counts(table)) == {'run-0', 'run-1'} for table in TABLES)
        for one in journal.history().runs:
            assert counts('fragments')[one.name] == len(one.fragments)
            assert counts('progress')[one.name] == sum(
                len(fragment.progress) for fragment in one.fragments.values()
            )
        again = JournalWriter(path)
        again.begin_run(ev.RunBegan(2e9, 'run-2'))
        again.take(ev.TrainerSubmitted(2e9, Trainer('x', 1, 1, 1)))
        again.flush()
        write_sqlite(journal.history('run-2'), database, 'our_')
        again.take(ev.Decided(2e9, (ev.EndTrainer('x', 'finished'),)))
        again.close()
        write_sqlite(journal.history(), database, 'our_')
        found = db.execute("SELECT state, total_samples FROM our_trainers WHERE run_id = 'run-2'")
        assert found.fetchall() == [('finished', 1)]
        assert db.execute('SELECT count(*) FROM task').fetchone() == (0,)


def write(path: Path, run: str, at: float, *events: ev.Event) -> None:
    journal = JournalWriter(path)
    journal.begin_run(ev.RunBegan(at, run))
    for event in events:
        journal.take(event)
    journal.close()


def test_fragments_of_all_runs_count_for_their_owners(tmp_path: Path) -> None:
    path = tmp_path / 'ledger'
    assert used_node_s(path) == {}
    a, b = Trainer('a', 1, 4, user='anna', group='lab'), Trainer('b', 1, 4, group='lab')
    for run, begin in (('first', 1000.0), ('second', 2000.0)):
        write(
            path,
            run,
            begin,
            ev.TrainerSubmitted(begin, a),
            ev.TrainerSubmitted(begin, b),
            ev.FragmentLaunched(begin, 'a', 1, ('n0', 'n1'), None, 0),
            ev.FragmentLaunched(begin, 'b', 1, ('n2',), None, 0),
            ev.FragmentEnded(begin + 50, 'a', 1, 0, ev.Ending.STOPPED),
            # In the first run, b's fragment is cut off with its run.
            ev.RunEnded(begin + 80, 'finished')
            if run == 'first'
            else ev.FragmentEnded(begin + 20, 'b', 1, 0, ev.Ending.STOPPED),
        )
    used = used_node_s(path)
    assert used['user anna'] == used['trainer a'] == pytest.approx(2 * 2 * 50)
    assert used['trainer b'] == pytest.approx(80 + 20)
    assert used['group lab'] == used['total'] == pytest.approx(200 + 100)


def test_blocks_of_all_runs_are_charged(tmp_path: Path) -> None:
    path = tmp_path / 'ledger'
    assert charged(path) == 0.0
    hourly = BlockRequest(2, 3600.0, charge=Charge(1.0), lasts_s=3600.0)
    for run in ('first', 'second'):
        write(
            path,
            run,
            0.0,
            ev.BlockOpened(0.0, 'requeued', hourly),
            ev.BlockStarted(20.0, 'requeued', 10.0),
            ev.BlockRequeued(1810.0, 'requeued'),
            ev.BlockStarted(2000.0, 'requeued', 2000.0),
            ev.BlockClosed(3800.0, 'requeued'),
            ev.BlockOpened(0.0, 'withdrawn', hourly),
            ev.BlockClosed(900.0, 'withdrawn'),
            # Its end is not known: it may have lasted as long as it could.
            *([ev.BlockOpened(4000.0, 'left', hourly)] if run == 'second' else []),
        )
    assert charged(path) == pytest.approx(2 * (2 * 0.5 + 2 * 0.5) + 2.0)
