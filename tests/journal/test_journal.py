"""The file of a run's events: private, whole after kill -9, readable while it is written."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import BlockRequest, Checkpoint, Trainer
from parsl_freetrain.journal import append, records
from parsl_freetrain.journal.append import JournalWriter
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.journal.records import HEAD
from tests.support.journals import demo_journal
from tests.support.waiting import LIMIT_S

ROOT = str(Path(__file__).parents[2])
TRAINER = Trainer('a', 1, 2, 9000)


def begun(path: Path, run: str = 'r0', at: float = 1000.0) -> JournalWriter:
    journal = JournalWriter(path)
    journal.begin_run(ev.RunBegan(at, run))
    return journal


def write(path: Path, *events: ev.Event, run: str = 'r0') -> None:
    journal = begun(path, run)
    for event in events:
        journal.take(event)
        journal.flush()
    journal.close()


def of(path: Path) -> list[ev.Event]:
    return [event for _, event in Journal(path).events()]


def test_everything_comes_back_as_it_was_told(tmp_path: Path) -> None:
    stop = ev.StopFragment('a', 1, 'rescale', ('n2',), ('n1',))
    told = [
        ev.BlockOpened(1001.0, 'b', BlockRequest(2), '77'),  # lasts for ever, an infinite number
        ev.TrainerSubmitted(1001.0, TRAINER),
        ev.CheckpointSaved(1002.0, Checkpoint('a', '/c', 8, 1, {'loss': 0.5}, {'any': [1, None]})),
        ev.Decided(1003.0, (stop,), 'Tick', 2, allocation={'a': 1}, problem=ev.packed({'x': [1]})),
    ]
    write(tmp_path / 'l', *told)
    found = of(tmp_path / 'l')[1:]
    assert found == told and repr(found) == repr(told)
    [decided] = [event for event in found if isinstance(event, ev.Decided)]
    assert decided.document == {'x': [1]}


def test_reports_may_be_of_numpy_and_odd(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {'loss': np.float32(0.5)}
    write(
        tmp_path / 'l',
        ev.FragmentProgressed(1.0, 'a', 1, np.int64(3), None, metrics),  # type: ignore[arg-type]
        ev.NodeUnusable(2.0, 'b', 'n', 'no file \udcff'),
        ev.TotalKnown(3.0, 'a', 2**70),
        ev.Tick(4.0),
    )
    progressed = ev.FragmentProgressed(1.0, 'a', 1, 3, None, {'loss': 0.5})
    unusable = ev.NodeUnusable(2.0, 'b', 'n', 'no file ?')
    assert of(tmp_path / 'l')[1:] == [progressed, unusable, ev.Tick(4.0)]
    assert 'leaves out' in caplog.text and 'TotalKnown' in caplog.text


def test_the_file_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / 'new' / 'l'
    umask = os.umask(0o022)
    try:
        begun(path).close()
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.chmod(0o644)
    JournalWriter(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / 'open').mkdir(mode=0o777)
    (tmp_path / 'open').chmod(0o777)
    with pytest.raises(BadInput, match='Other users may write to folder of the ledger'):
        JournalWriter(tmp_path / 'open' / 'l')


def test_a_resume_appends(tmp_path: Path) -> None:
    path = tmp_path / 'l'
    for run, at in (('r0', 1000.0), ('r1', 2000.0)):
        journal = begun(path, run, at)
        journal.take(ev.TrainerSubmitted(at, TRAINER))
        journal.take(ev.FragmentLaunched(at + 1, 'a', 1, ('n',), None, 0))
        journal.close()
    with pytest.raises(BadInput, match="has a run 'r1' already"):
        begun(path, 'r1')

    assert [f.key for f in Journal(path).history().fragments] == [(1, 'a', 1), (2, 'a', 1)]
    assert [f.launched.at for f in Journal(path).history('r0').fragments] == [1001]
    with pytest.raises(BadInput, match="no run 'r7'; its last runs are: r0, r1"):
        Journal(path).history('r7')


@pytest.mark.parametrize('opener', [JournalWriter, Journal])
def test_what_is_no_journal_gets_sentence(tmp_path: Path, opener: Callable[[Path], object]) -> None:
    newer, text = tmp_path / 'newer', tmp_path / 'notes.txt'
    newer.write_bytes(HEAD.replace(b'1\n', b'9\n'))
    text.write_text('not a journal at all, whatever its name says\n' * 50)
    for path, says in (
        (newer, 'is a ledger of version 9, and this parsl-freetrain reads version 1'),
        (text, 'is not a FreeTrain ledger'),
    ):
        before = path.read_bytes()
        with pytest.raises(BadInput, match=says):
            opener(path)
        assert path.read_bytes() == before
    os.mkfifo(pipe := tmp_path / 'pipe')
    for no_file in (tmp_path, pipe):
        with pytest.raises(BadInput, match='regular file'):
            opener(no_file)
    with pytest.raises(BadInput, match='cannot be written|no ledger at'):
        opener(text / 'l')


def test_nothing_is_seen_before_it_is_flushed_and_all_of_it_after(tmp_path: Path) -> None:
    journal = begun(tmp_path / 'l')
    reader = Journal(tmp_path / 'l')
    journal.take(ev.TrainerSubmitted(1001.0, TRAINER))
    journal.take(ev.NodesJoined(1001.0, 'b', ('n',)))
    assert not list(reader.history().trainings)
    journal.flush()
    assert len(list(reader.history().trainings)) == len(list(reader.history().nodes)) == 1
    journal.close()


def test_after_kill_9_all_that_was_flushed_is_there(tmp_path: Path) -> None:
    path = tmp_path / 'l'
    code = (
        'import sys; from parsl_freetrain.journal.append import JournalWriter\n'
        'from parsl_freetrain.core.model import events as ev\n'
        'journal = JournalWriter(sys.argv[1]); journal.begin_run(ev.RunBegan(1.0, "r0"))\n'
        'i = 0\n'
        'while True:\n'
        '    for _ in range(50): journal.take(ev.NodeUnusable(2.0 + i, "b", str(i), "y" * 500))\n'
        '    journal.flush(); print(i, flush=True); i += 1\n'
    )
    writer = subprocess.Popen(
        [sys.executable, '-c', code, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    told = -1
    for line in writer.stdout:
        told = int(line)
        if told >= 20:
            break
    writer.send_signal(signal.SIGKILL)
    told = max([told, *(int(line) for line in writer.stdout if line.endswith('\n'))])
    writer.wait(LIMIT_S)
    writer.stdout.close()
    reader = Journal(path)
    run = reader.history().runs[0]
    rounds = [node.node for node in run.unusable]
    assert len(rounds) // 50 in (told + 1, told + 2)
    assert rounds == [str(i) for i in range(len(rounds) // 50) for _ in range(50)]
    assert reader.history().alive(run) and not reader.history().damage
    begun(path, 'r1', 5000.0).close()
    assert not reader.history().alive(run)


@pytest.mark.parametrize('cut', [0, 5, len(HEAD) - 1, 'zeros', 'head', 'overwritten'])
def test_what_remains_of_a_journal_is_set_aside_at_the_start(
    tmp_path: Path,
    cut: int | str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was cut just before its writer died: a restart must not need a person."""
    path = tmp_path / ('ledger.journal' if cut == 'overwritten' else 'l')
    demo_journal(path)
    whole = path.read_bytes()
    path.write_bytes(
        whole[:cut]
        if isinstance(cut, int)
        else bytes(1000)
        if cut == 'zeros'
        else b'x' * 5000
        if cut == 'overwritten'
        else bytes(len(HEAD)) + whole[len(HEAD) :]
    )
    now = path.read_bytes()
    with monkeypatch.context() as killed:  # in the middle, if it is set aside at all
        killed.setattr(Path, 'replace', lambda *_: sys.exit('killed'))
        with contextlib.suppress(BaseException):
            JournalWriter(path).close()
    assert path.read_bytes() == (now or HEAD)
    caplog.clear()
    writer = JournalWriter(path)
    writer.begin_run(ev.RunBegan(9.0, 'next'))
    writer.close()
    runs = [run.name for run in Journal(path).history().runs]
    assert runs[-1] == 'next'
    assert (len(runs) > 1) is (cut == 'head'), 'what can be read is kept'
    assert (tmp_path / f'{path.name}.damaged-1').exists() is (cut != 0)
    assert ('has lost its beginning' in caplog.text) is (cut != 0)


@given(cut=st.integers(0, 400))
@settings(max_examples=40, deadline=None)
def test_a_torn_end_is_dropped_at_once(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp('torn') / 'l'
    write(path, *(ev.NodeUnusable(float(i), 'b', str(i), 'x' * 50) for i in range(20)))
    whole = of(path)
    os.truncate(path, path.stat().st_size - cut)
    left = of(path)
    assert left == whole[: len(left)] and len(left) >= len(whole) - 1 - cut // 80
    reader = Journal(path)
    write(path, ev.Tick(9.0), run='r1')
    assert of(path) == [*left, ev.RunBegan(1000.0, 'r1'), ev.Tick(9.0)]
    assert not reader.history().damage and len(reader.history().runs) == 2


@given(at=st.integers(200, 2500), size=st.integers(1, 700), seed=st.binary(min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_damage_in_the_middle_is_named_and_everything_else_counts(
    tmp_path_factory: pytest.TempPathFactory, at: int, size: int, seed: bytes
) -> None:
    path = tmp_path_factory.mktemp('damaged') / 'l'
    write(path, *(ev.NodeUnusable(float(i), 'b', str(i), 'x' * 70) for i in range(30)))
    whole, content = of(path), bytearray(path.read_bytes())
    assert len(content) > 3300
    harm = (seed * size)[:size]
    if content[at : at + size] == harm:
        return
    content[at : at + size] = harm
    path.write_bytes(content)
    reader = Journal(path)
    left = of(path)
    assert len(left) >= len(whole) - 2 - size // 100 and set(map(repr, left)) <= set(
        map(repr, whole)
    )
    [damage] = reader.history().damage
    start, end = (int(word) for word in damage.split() if word.isdigit())
    assert start <= at + size and end >= at and end - start < size + 400
    assert str(path) in damage


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    path.write_bytes(b'a disk that went mad ' * 5000)


def replace(path: Path) -> None:
    path.unlink()
    path.write_text('not a journal')


@pytest.mark.parametrize('harm', [half, overwrite, replace, Path.unlink])
def test_a_journal_that_is_damaged_while_it_is_written_is_begun_anew(
    tmp_path: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / 'l'
    write(path, ev.Tick(1.0), run='earlier')
    journal = begun(path)
    journal.take(ev.TrainerSubmitted(1001.0, TRAINER))
    journal.take(ev.NodesJoined(1003.0, 'b', ('x', 'y')))
    journal.flush()
    for n in range(300):
        journal.take(ev.FragmentProgressed(1004.0, 'a', 1, n))
    journal.flush()
    reader = Journal(path)
    reader.history()
    harm(path)
    journal.take(ev.NodesLeft(1006.0, ('y',)))
    journal.flush()
    [warning] = [r.getMessage() for r in caplog.records if 'was damaged' in r.getMessage()]
    was_there = harm is not Path.unlink
    assert (tmp_path / 'l.damaged-1').exists() is was_there
    assert ('l.damaged-1' in warning) is was_there
    journal.take(ev.Decided(1007.0, (ev.EndTrainer('a', 'failed', 'of it'),)))
    journal.take(ev.RunEnded(1008.0, 'shutdown'))
    assert path.stat().st_mode & 0o777 == 0o600
    assert {p.name for p in tmp_path.iterdir()} <= {'l', 'l.damaged-1'}
    history = reader.history()
    names = [run.name for run in history.runs]
    assert names[-1] == 'r0' and ('earlier' in names) is (harm not in (overwrite,))
    run = history.runs[-1]
    assert run.how == 'shutdown' and run.trainers['a'].state == 'failed'
    assert {node.name: node.left_at for node in run.nodes.values()} == {'x': None, 'y': 1006.0}


def test_without_a_new_file_the_events_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / 'folder'
    journal = begun(folder / 'l')
    (folder / 'l').unlink()
    folder.rename(tmp_path / 'elsewhere')
    folder.write_text('in the way')
    journal.take(ev.NodesJoined(1001.0, 'b', ('waits',)))
    journal.flush()
    journal.flush()
    assert len(caplog.records) == 1 and 'kept in memory' in caplog.text
    folder.unlink()
    folder.mkdir(mode=0o700)
    journal.flush()
    journal.close()
    assert [node.name for node in Journal(folder / 'l').history().nodes] == ['waits']


def test_a_full_disk_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, really = begun(tmp_path / 'l'), os.write
    before = (tmp_path / 'l').read_bytes()

    def full(fd: int, data: bytes) -> int:
        return really(fd, data[:10])

    monkeypatch.setattr(append, 'MOST_HELD', 1000)
    monkeypatch.setattr(journal, '_thin_at', 1000)
    with monkeypatch.context() as patched:
        patched.setattr(os, 'write', full)
        for n in range(3000):
            journal.take(ev.FragmentProgressed(1001.0, 'a', 1, n))
            if n % 100 == 0:
                journal.flush()
        journal.take(ev.TrainerSubmitted(1002.0, TRAINER))
        journal.flush()
        assert (tmp_path / 'l').read_bytes() == before
    assert len(journal._pending) <= 1000 and 'are left out' in caplog.text
    journal.flush()
    journal.close()
    assert not Journal(tmp_path / 'l').history().damage
    assert [t.name for t in Journal(tmp_path / 'l').history().trainings] == ['a']


def test_a_run_that_has_nothing_to_say_notes_that_it_is_alive(tmp_path: Path) -> None:
    journal = begun(tmp_path / 'l')
    for second in range(100):
        journal.take(ev.OffersSeen(1000.0 + second))
        journal.flush()
    signs = [event.at for event in of(tmp_path / 'l') if isinstance(event, ev.OffersSeen)]
    assert signs == [1030.0, 1060.0, 1090.0]
    journal.close()
    journal.flush()
    journal.close()


def test_false_lengths_cost_little_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's file: a thousand records that claim more than there is, or too much."""
    monkeypatch.setattr(records, '_MOST', 2**26)
    path = tmp_path / 'l'
    write(path, ev.Tick(9.0))
    whole = of(path)
    lengths = (2**30, 2**26)
    false = b''.join(b'\xfcFTj' + n.to_bytes(4, 'little') + bytes(4) for n in lengths)
    with path.open('ab') as file:
        file.write(false * 20_000)
        file.truncate(2**40)
    assert of(path) == whole
    write(path, ev.Tick(10.0), run='r1')  # which the false lengths would hide
    assert [run.name for run in Journal(path).history().runs] == ['r0', 'r1']


def test_a_hole_of_a_terabyte_costs_no_reading(tmp_path: Path) -> None:
    path = tmp_path / 'l'
    write(path, ev.Tick(9.0))
    os.truncate(path, 2**40)
    write(path, ev.Tick(10.0), run='r1')
    assert [run.name for run in Journal(path).history().runs] == ['r0', 'r1']
