"""The ledger's file: private, whole after kill -9, readable while it is written."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings, DecisionSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import NodesJoined, StartFragment
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.writer import Ledger
from tests.support.programs import run_to_end
from tests.support.waiting import LIMIT_S

ROOT = str(Path(__file__).parents[2])
SETTINGS = DecisionSettings(ControllerSettings(horizon_s=90.0, caps={'user a': 3}), 'auto', 10.0)
JOINED = NodesJoined(1002.0, 'b', ('b/x',), 1034.5)
START = StartFragment('a', 1, ('b/x',), 1034.5, 64)


def begun(path: Path, run: str = 'r0', at: float = 1000.0) -> Ledger:
    ledger = Ledger(path)
    ledger.begin_run(
        run, at=at, parsl_run_dir='runinfo/000', command='python train.py', settings=SETTINGS
    )
    return ledger


def test_everything_comes_back_as_it_was_told(tmp_path: Path) -> None:
    seen, loss = cast(int, np.int64(128)), cast(float, np.float32(0.5))  # what users report
    ledger = begun(tmp_path / 'l.db')
    ledger.event(
        at=1001,
        kind='Tick',
        trainer='a',
        fragment=3,
        block='b',
        node='n',
        detail={'x': [1, 2], 'p': Path('/p')},
    )
    ledger.decisions.batch(1002, [JOINED])
    ledger.decisions.decision(
        at=1002, trigger='NodesJoined', nodes=4, status='optimal', solver='milp', objective=9.5,
        seconds=0.01, staying=3.0, bound=9.75, current={'a': 1}, allocation={'a': 4},
        actions=[START],
    )  # fmt: skip
    ledger.trainers.submitted(
        name='a', at=1003, spec={'min_nodes': 1}, total_samples=None, samples=64
    )
    ledger.trainers.total('a', 1000)
    ledger.nodes.block_opened('b', at=1004, job_id='77', nodes=2, walltime_s=30.0, names=['x', 'y'])
    ledger.nodes.joined('b/x', at=1005, block='b', name='x')
    ledger.trainers.fragment_decided(
        'a', 1, at=1006, task_id=12, nodes=['b/x'], deadline=1034.0, from_samples=64
    )
    ledger.trainers.fragment_started('a', 1, at=1007, samples=64)
    ledger.trainers.fragment_progress(
        'a', 1, at=1008, samples=seen, rate=64.0, metrics={'loss': loss}
    )
    ledger.trainers.checkpoint(
        'a',
        1,
        at=1009,
        samples=128,
        path='ck/1',
        seconds=0.25,
        pause_s=0.5,
        metrics={'loss': float('nan')},
    )
    ledger.trainers.fragment_ended(
        'a', 1, at=1010, ending='failed', samples=128, reached=192, error='bad name \udcff'
    )
    ledger.trainers.state('a', at=1011, state='failed', why='of it')
    ledger.nodes.left('b/x', at=1012, how='taken')
    ledger.nodes.block_until('b', until=1020.0)
    ledger.nodes.block_closed('b', at=1013, how='taken')
    ledger.nodes.offered([('x', 1000.0, 1013.0), ('y', 1000.0, None), ('z', 1000.0, float('inf'))])
    ledger.end_run('r0', at=1014, how='done')
    ledger.close()
    ledger.close()

    with Reader(tmp_path / 'l.db') as reader:
        history = reader.history('r0')
        [batch] = reader.batches(history.runs[0])
        (event,), (decision,), (progress,) = (
            reader.events(),
            reader.decisions('r0'),
            reader.progress(),
        )
    (run,), (trainer,), (block,), (node,), (fragment,), (checkpoint,) = (
        history.runs, history.trainers, history.blocks, history.nodes, history.fragments,
        history.checkpoints,
    )  # fmt: skip
    assert (run.name, run.begun_at, run.ended_at, run.how, run.last_at) == (
        'r0',
        1000,
        1014,
        'done',
        1014,
    )
    assert (batch.seq, batch.at, batch.events) == (1, 1002, (JOINED,)) and run.settings == SETTINGS
    assert event['detail'] == {'x': [1, 2], 'p': '/p'} and event['fragment'] == 3
    assert (
        decision['allocation'] == {'a': 4}
        and (decision['actions'], decision['batch']) == ((START,), 1)
        and (decision['staying'], decision['bound']) == (3.0, 9.75)
    )
    assert (trainer.total_samples, trainer.first_samples, trainer.samples, trainer.state) == (
        1000,
        64,
        128,
        'failed',
    )
    assert (block.until, block.how, block.names) == (1020.0, 'taken', ('x', 'y'))
    assert (node.name, node.left_at) == ('x', 1012)
    assert (fragment.task_id, fragment.nodes, fragment.started_at, fragment.ending) == (
        12,
        ('b/x',),
        1007,
        'failed',
    )
    assert fragment.metrics == {'loss': 0.5} == progress.metrics and fragment.error == 'bad name ?'
    assert checkpoint.path == 'ck/1' and checkpoint.metrics['loss'] != checkpoint.metrics['loss']
    assert [o.end for o in history.offers] == [1013.0, None, None]


def test_offers_are_written_as_they_change(tmp_path: Path) -> None:
    """Each row is what a site says of the last while, clipped; nothing is written twice."""
    ledger = begun(tmp_path / 'l.db')
    for rows in (
        [('x', 0.0, 5.0), ('y', 0.0, 5.0)],
        [('x', 0.0, 10.0), ('y', 0.0, 5.0)],
        [('x', 2.0, 10.0), ('y', 2.0, 5.0)],
        [('x', 4.0, 15.0), ('y', 4.0, 5.0), ('y', 12.0, 15.0)],
    ):
        changes = ledger._connection.total_changes
        ledger.nodes.offered(rows)
        ledger.commit()
    assert ledger._connection.total_changes - changes == 3  # one is longer, one new; the run lives
    ledger.close()
    with Reader(tmp_path / 'l.db') as reader:
        offers = reader.history().offers
    assert [(o.name, o.start, o.end) for o in offers] == [
        ('x', 0.0, 15.0), ('y', 0.0, 5.0), ('y', 12.0, 15.0)
    ]  # fmt: skip


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        ledger = begun(tmp_path / 'new' / 'l.db')
        ledger.close()
    finally:
        os.umask(umask)
    path = tmp_path / 'new' / 'l.db'
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    Ledger(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_resume_appends_and_the_older_fragment_of_the_same_number_stays(tmp_path: Path) -> None:
    for run, at in (('r0', 1000.0), ('r1', 2000.0)):
        ledger = begun(tmp_path / 'l.db', run, at)
        ledger.trainers.submitted(name='a', at=at, spec={}, total_samples=10, samples=0)
        ledger.trainers.fragment_decided(
            'a', 1, at=at + 1, task_id=1, nodes=['n'], deadline=None, from_samples=0
        )
        ledger.close()
    with pytest.raises(BadInput, match="has a run 'r1' already"):
        begun(tmp_path / 'l.db', 'r1')
    with Reader(tmp_path / 'l.db') as reader:
        assert [f.decided_at for f in reader.history().fragments] == [1001, 2001]
        assert [f.decided_at for f in reader.history('r0').fragments] == [1001]
        with pytest.raises(BadInput, match="no run 'r7'; its last runs are: r0, r1"):
            reader.history('r7')


@pytest.mark.parametrize('opener', [Ledger, Reader])
def test_what_is_no_ledger_gets_a_sentence(tmp_path: Path, opener: type[Ledger | Reader]) -> None:
    newer, older, other, text = (
        tmp_path / name for name in ('newer.db', 'older.db', 'other.db', 'notes.txt')
    )
    for path, version in ((newer, 99), (older, 2)):
        begun(path).close()
        with sqlite3.connect(path) as db:
            db.execute(f'PRAGMA user_version = {version}')
    with sqlite3.connect(other) as db:
        db.execute('CREATE TABLE t (x)')
    text.write_text('not a database at all, whatever its name says\n' * 50)
    for path, says in (
        (newer, 'is a ledger of version 99'),
        (older, 'is a ledger of version 2, and this parsl-freetrain reads version 5'),
        (other, 'not a FreeTrain'),
        (text, 'is not a FreeTrain ledger'),
    ):
        before = path.read_bytes()
        with pytest.raises(BadInput, match=says):
            opener(path)
        assert path.read_bytes() == before
    with pytest.raises(BadInput, match='regular file|no ledger at'):
        opener(tmp_path)
    with pytest.raises(BadInput, match='cannot be written|no ledger at'):
        opener(text / 'l.db')


def test_nothing_is_seen_before_the_commit_and_all_of_it_after(tmp_path: Path) -> None:
    ledger = begun(tmp_path / 'l.db')
    with Reader(tmp_path / 'l.db') as reader:
        ledger.trainers.submitted(name='a', at=1001, spec={}, total_samples=1, samples=0)
        ledger.nodes.joined('n', at=1001, block='b', name='n')
        assert reader.history().trainers == () and reader.history().nodes == ()
        ledger.commit()
        assert len(reader.history().trainers) == len(reader.history().nodes) == 1
    ledger.close()


def test_another_process_reads_while_the_writer_lives(tmp_path: Path) -> None:
    ledger = begun(tmp_path / 'l.db')
    ledger.event(at=1001, kind='first')
    ledger.commit()
    ledger.event(at=1002, kind='pending')
    code = (
        'import sys; from parsl_freetrain.ledger.reader import Reader\n'
        'print([e["kind"] for e in Reader(sys.argv[1]).events()])'
    )
    seen = run_to_end([sys.executable, '-c', code, str(tmp_path / 'l.db')], cwd=ROOT, check=True)
    assert seen.stdout == "['first']\n"
    ledger.close()


def test_after_kill_9_all_that_was_committed_is_there(tmp_path: Path) -> None:
    path = tmp_path / 'l.db'
    code = (
        'import sys; from parsl_freetrain.ledger.writer import Ledger\n'
        'ledger = Ledger(sys.argv[1])\n'
        'ledger.begin_run("r0", at=1.0, parsl_run_dir="", command="")\n'
        'i = 0\n'
        'while True:\n'
        '    for _ in range(50): ledger.event(at=2.0 + i, kind=f"round {i}", '
        'detail={"x": "y" * 500})\n'
        '    ledger.commit(); print(i, flush=True); i += 1\n'
    )
    writer = subprocess.Popen(
        [sys.executable, '-c', code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    committed = -1
    for line in writer.stdout:
        committed = int(line)
        if committed >= 20:
            break
    writer.send_signal(signal.SIGKILL)
    # Rounds may have been told between the last line read and the end.
    committed = max([committed, *(int(line) for line in writer.stdout if line.endswith('\n'))])
    writer.wait(LIMIT_S)
    writer.stdout.close()

    with Reader(path) as reader:
        kinds = [e['kind'] for e in reader.events()]
        rounds = len(kinds) // 50
        assert kinds == [f'round {i}' for i in range(rounds) for _ in range(50)]
        assert rounds in (committed + 1, committed + 2)
        assert reader.history().alive(reader.history().runs[0])
    again = begun(path, 'r1', 5000.0)
    again.event(at=5001, kind='on it goes')
    again.close()
    with Reader(path) as reader:
        assert len(reader.events('r1')) == 1
        assert not reader.history().alive(reader.history().runs[0])


def test_a_writer_killed_in_the_middle_of_a_commit_leaves_a_readable_ledger(tmp_path: Path) -> None:
    (tmp_path / 'live').mkdir()
    ledger = begun(tmp_path / 'live' / 'l.db')
    for _ in range(200):
        ledger.event(at=1001, kind='kept', detail={'x': 'y' * 500})
    ledger.close()
    # A transaction that has spilled into the file, as it lies on the disk when its process dies.
    db = sqlite3.connect(tmp_path / 'live' / 'l.db', isolation_level=None)
    db.execute('PRAGMA cache_size = 1')
    db.execute('BEGIN IMMEDIATE')
    db.execute("UPDATE events SET kind = 'torn', detail = detail || detail")
    shutil.copytree(tmp_path / 'live', tmp_path / 'dead')
    db.execute('ROLLBACK')
    db.close()
    assert (tmp_path / 'dead' / 'l.db-journal').stat().st_size > 0
    assert b'torn' in (tmp_path / 'dead' / 'l.db').read_bytes()

    with Reader(tmp_path / 'dead' / 'l.db') as reader:
        assert {e['kind'] for e in reader.events()} == {'kept'} and len(reader.events()) == 200


def test_a_reader_that_is_open_meets_a_torn_commit(tmp_path: Path) -> None:
    (tmp_path / 'live').mkdir()
    path = tmp_path / 'live' / 'l.db'
    ledger = begun(path)
    ledger.event(at=1001, kind='kept')
    ledger.close()
    with Reader(path) as reader:
        code = (
            'import os, signal, sqlite3, sys\n'
            'db = sqlite3.connect(sys.argv[1], isolation_level=None)\n'
            'db.execute("PRAGMA cache_size = 1"); db.execute("BEGIN IMMEDIATE")\n'
            'row = "INSERT INTO events (run, at, kind) VALUES (1, 2, ?)"\n'
            'for i in range(200): db.execute(row, ("z" * 900,))\n'
            'os.kill(os.getpid(), signal.SIGKILL)\n'
        )
        writer = subprocess.run(
            [sys.executable, '-c', code, str(path)], timeout=LIMIT_S, check=False
        )
        assert writer.returncode == -signal.SIGKILL
        assert (tmp_path / 'live' / 'l.db-journal').exists()
        assert [e['kind'] for e in reader.events()] == ['kept']


def test_one_thread_writes_until_it_has_ended(tmp_path: Path) -> None:
    ledger = begun(tmp_path / 'l.db')
    told, leave = threading.Event(), threading.Event()

    def planner() -> None:
        ledger.event(at=1001, kind='Tick')
        told.set()
        leave.wait(LIMIT_S)

    thread = threading.Thread(target=planner, name='planner')
    thread.start()
    try:
        assert told.wait(LIMIT_S)
        with pytest.raises(RuntimeError, match="written by thread 'planner' and was called from"):
            ledger.event(at=1002, kind='Tick')
    finally:
        leave.set()
        thread.join(LIMIT_S)
    ledger.end_run('r0', at=1003, how='done')
    ledger.close()
    with Reader(tmp_path / 'l.db') as reader:
        assert len(reader.events()) == 1


def test_writing_needs_a_run(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / 'l.db')
    with pytest.raises(RuntimeError, match='call begin_run first'):
        ledger.event(at=1.0, kind='Tick')
    ledger.close()


def test_a_closed_ledger_has_nothing_to_write(tmp_path: Path) -> None:
    """An interrupted program may close it while the event loop is still in its last round."""
    ledger = begun(tmp_path / 'l.db')
    ledger.event(at=1001, kind='Tick')
    ledger.close()
    ledger.commit()
    with Reader(tmp_path / 'l.db') as reader:
        assert [event['kind'] for event in reader.events()] == ['Tick']
