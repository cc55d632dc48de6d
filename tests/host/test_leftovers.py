"""A manager that is killed with all of its processes leaves files only until the next one."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from parsl_freetrain.host.leftovers import PREFIX, SHARED, own_names, remove_leftovers
from tests.support.programs import Program, run_to_end
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
MANAGER = """
import multiprocessing, os, sys
from parsl_freetrain.host.leftovers import own_names
if __name__ == '__main__':
    with own_names():
        context = multiprocessing.get_context('forkserver')
        with context.Manager() as shared:
            kept, semaphore = shared.dict(), context.Semaphore()
            folder = multiprocessing.current_process()._config['tempdir']
            print(os.path.basename(folder), flush=True)
            sys.stdin.read()
"""


@dataclass
class Manager:
    process: subprocess.Popen[str]
    name: str

    def left(self) -> list[Path]:
        """Its folder, and its semaphores."""
        return [path for path in SHARED.iterdir() if self.name in path.name]

    def end(self) -> int:
        self.process.communicate('', timeout=LIMIT_S)
        return self.process.returncode


def start(folder: Path) -> Manager:
    """One with a temporary folder of its own."""
    folder.mkdir()
    script = folder.with_suffix('.py')
    script.write_text(MANAGER)
    process = Program(
        [sys.executable, script], more_env={'TMPDIR': str(folder)}, start_new_session=True
    )
    return Manager(process, process.said())


def test_what_a_killed_manager_leaves_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """Each job has a TMPDIR of its own, which is gone when the next one starts."""
    killed = start(tmp_path / 'of-killed')
    assert killed.left()  # any node that starts beside this test may remove them from now on
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.process.communicate(timeout=LIMIT_S)
    shutil.rmtree(tmp_path / 'of-killed')

    living, another = start(tmp_path / 'of-living'), start(tmp_path / 'of-another')
    assert not killed.left()
    assert another.end() == 0
    assert living.left()  # a living manager's are left alone
    assert living.end() == 0
    assert not living.left() and not another.left()
    assert not list((tmp_path / 'of-living').iterdir())


KILLED = """
import fcntl, os, signal
from parsl_freetrain.host.leftovers import own_names
lock = fcntl.flock
def killed_first(fd, how):
    if how != fcntl.LOCK_EX:
        return lock(fd, how)
    print(os.readlink(f'/proc/self/fd/{fd}'), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
fcntl.flock = killed_first
with own_names():
    pass
"""


def test_a_manager_killed_before_it_locks_its_folder_leaves_it_to_the_next(tmp_path: Path) -> None:
    own = {'TMPDIR': str(tmp_path), 'PYTHONPATH': str(ROOT)}
    killed = run_to_end([sys.executable, '-c', KILLED], more_env=own)
    assert killed.returncode == -signal.SIGKILL
    folder = Path(killed.stdout.strip())
    assert folder.parent == SHARED and folder.name.startswith(PREFIX)
    remove_leftovers()
    assert not folder.exists()
    assert not list(tmp_path.iterdir())


def test_a_folder_not_yet_locked_may_be_taken_as_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def made_and_taken(folder: Path, mode: int) -> None:
        mkdir(folder, mode)
        made.append(folder)
        if len(made) == 1:
            remove_leftovers()

    mkdir = Path.mkdir
    monkeypatch.setattr(Path, 'mkdir', made_and_taken)
    monkeypatch.setattr(multiprocessing.current_process(), '_config', {})
    with own_names():
        first, second = made
        assert not first.exists()
        remove_leftovers()
        assert second.exists()
    assert not second.exists()
