"""Two live runs never share a checkpoint folder."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from parsl_freetrain import BadInput, LocalSite, TrainerFailed, freetrain_app
from parsl_freetrain.cli.main import main
from parsl_freetrain.core.model.events import OffersSeen
from parsl_freetrain.executor import run_lock
from parsl_freetrain.executor.run_lock import FILE, SILENT_S, RunLock
from parsl_freetrain.training.process import block_lease
from parsl_freetrain.training.process.block_lease import Holder, write_holder
from tests.support.programs import Program
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until

LIVES = """
import sys
from pathlib import Path
from parsl_freetrain import LocalSite
from tests.support.training import fit, freetrain
from tests.support.waiting import LIMIT_S, wait_until
with freetrain(Path(sys.argv[1]), LocalSite(nodes=1)):
    print('begun', flush=True)
    sys.stdin.read()
"""


@pytest.mark.usefixtures('nodes_share_a_template')
def test_a_second_live_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = str(tmp_path / 'checkpoints' / 'ledger.journal')

    def state() -> str:
        assert main(['status', '--json', '--ledger', ledger]) == 0
        return str(json.loads(capsys.readouterr().out)['state'])

    with Program([sys.executable, '-c', LIVES, tmp_path]) as first:
        assert first.said() == 'begun'
        with (
            pytest.raises(BadInput, match=f'alive: process {first.pid} on '),
            freetrain(tmp_path, LocalSite(nodes=1)),
        ):
            pass
        assert state() == 'running'
        first.stdin.close()
    with freetrain(tmp_path, LocalSite(nodes=1)):
        assert state() == 'running'


def test_a_run_on_another_computer_lives_as_long_as_it_touches_its_file(tmp_path: Path) -> None:
    write_holder(tmp_path / FILE, Holder('theirs', 'elsewhere', 1, '1'))
    with pytest.raises(BadInput, match='process 1 on elsewhere.*the folder is free in'):
        RunLock(tmp_path, 'mine').take_folder()
    long_ago = time.time() - 2 * SILENT_S
    os.utime(tmp_path / FILE, (long_ago, long_ago))
    mine = RunLock(tmp_path, 'mine')
    mine.take_folder()
    mine.free_folder()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('kind', ['cut', 'a pipe', 'a folder'])
def test_a_damaged_file_of_a_dead_run_is_set_aside(tmp_path: Path, kind: str) -> None:
    path, before = tmp_path / FILE, RunLock(tmp_path, 'before')
    before.take_folder()
    content = path.read_bytes()
    if kind == 'cut':
        path.write_bytes(content[:7])
    else:
        path.unlink()
        os.mkfifo(path) if kind == 'a pipe' else path.mkdir()
    mine = RunLock(tmp_path, 'mine')
    mine.take_folder()
    assert len(list(tmp_path.glob(f'{FILE}.damaged-*'))) == 1
    before.take(OffersSeen(1e9))
    assert 'has taken the checkpoint_dir' in before.lost, 'if it lives after all'
    path.write_bytes(content[:7])
    mine.take(OffersSeen(1e9))
    assert not mine.lost, 'a live run writes its file again'
    mine.take(OffersSeen(2e9))
    assert not mine.lost
    mine.free_folder()
    assert not path.exists()


def test_a_clock_that_was_set_back_ends_no_signs_of_life(tmp_path: Path) -> None:
    lock = RunLock(tmp_path, 'mine')
    lock.take_folder()
    lock.take(OffersSeen(1_000_000.0, ()))
    os.utime(tmp_path / FILE, (1, 1))
    lock.take(OffersSeen(1_000_000.0 - 3600.0, ()))
    assert (tmp_path / FILE).stat().st_mtime > 1
    lock.free_folder()


def test_of_two_runs_one_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one looks when the first has looked and not yet written."""
    said: list[str] = []

    def begin(name: str) -> None:
        try:
            RunLock(tmp_path, name).take_folder()
        except BadInput as error:
            said.append(str(error))
        else:
            said.append('has it')

    second = threading.Thread(target=begin, args=('second',))

    def meanwhile(path: Path, holder: Holder) -> None:
        if holder.run == 'first':
            second.start()
            second.join(1.0)
        write_holder(path, holder)

    monkeypatch.setattr(block_lease, 'write_holder', meanwhile)
    begin('first')
    second.join()
    found = sorted(text.partition(' has the checkpoint_dir')[0] for text in said)
    assert found == ["Executor '' of this program", 'has it']


def test_a_run_killed_as_it_began_costs_a_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, 'CLAIM_S', 0.3)
    (tmp_path / f'.{FILE}.claim').touch()
    with pytest.raises(BadInput, match='or was killed as it began; try again'):
        RunLock(tmp_path, 'mine').take_folder()
    mine = RunLock(tmp_path, 'mine')
    mine.take_folder()
    mine.free_folder()
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_its_folder_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for minutes, for instance, and the other one is on another computer."""
    monkeypatch.setattr(run_lock, 'BEAT_S', 0.0)
    file = tmp_path / 'checkpoints' / FILE
    with freetrain(tmp_path, LocalSite(nodes=1, poll_s=0.2)):
        future = freetrain_app(max_nodes=1, total_epochs=10**6)(fit)(pause_s=0.1)
        wait_until(lambda: future.progress().samples > 0)
        write_holder(file, Holder('theirs', 'elsewhere', 1, '1'))
        with pytest.raises(TrainerFailed, match='process 1 on elsewhere has taken the checkpoint'):
            future.result(LIMIT_S)
    assert file.exists()  # it is the other one's
