"""A manager that is killed with all of its processes leaves files only until the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from parsl_freetrain.executor.block.leftovers import PREFIX, SEMAPHORES
from tests.support.waiting import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
MANAGER = """
import multiprocessing, sys
from parsl_freetrain.executor.block.leftovers import own_names
if __name__ == '__main__':
    with own_names():
        context = multiprocessing.get_context('forkserver')
        with context.Manager() as shared:
            kept, semaphore = shared.dict(), context.Semaphore()
            print('ready', flush=True)
            sys.stdin.read()
"""


def left(folder: Path) -> list[str]:
    """The files of managers whose temporary folder is ``folder``."""
    names = [path.name for path in folder.glob(f'{PREFIX}*')]
    return names + [
        semaphore.name for name in names for semaphore in SEMAPHORES.glob(f'sem.{name}-*')
    ]


def start(folder: Path) -> subprocess.Popen[str]:
    script = folder / 'manager.py'
    script.write_text(MANAGER)
    manager = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, 'TMPDIR': str(folder), 'PYTHONPATH': str(ROOT)},
        start_new_session=True,
        text=True,
    )
    assert manager.stdout is not None and manager.stdout.readline() == 'ready\n'
    return manager


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder whose sockets have short enough names, whatever pytest's is."""
    with tempfile.TemporaryDirectory(prefix='ft-', dir='/tmp') as folder:
        yield Path(folder)


def test_what_a_killed_manager_leaves_is_removed_by_the_next_one(short: Path) -> None:
    killed = start(short)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=LIMIT_S)
    of_killed = left(short)
    assert len(of_killed) >= 2  # its folder, and semaphores

    living, another = start(short), start(short)
    assert not set(of_killed) & set(left(short))
    another.communicate('', timeout=LIMIT_S)
    assert left(short)  # a living manager's are left alone
    living.communicate('', timeout=LIMIT_S)
    assert (living.returncode, another.returncode) == (0, 0)
    assert not left(short) and not list(short.glob('pymp-*'))
