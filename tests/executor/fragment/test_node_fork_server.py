"""What a worker knows of its manager."""

import multiprocessing
import os
from pathlib import Path

from parsl_freetrain.executor.fragment.node_fork_server import manager_pid
from tests.support.waiting import wait_until

SPAWN = multiprocessing.get_context('spawn')  # as Parsl starts its workers


def works(folder: Path) -> None:
    parent = os.getppid()
    (folder / 'began').touch()
    wait_until(lambda: os.getppid() != parent)
    (folder / 'told').write_text(f'{manager_pid()}\n')


def manages(folder: Path) -> None:
    worker = SPAWN.Process(target=works, args=(folder,))
    worker.start()
    worker.join()


def test_a_worker_whose_manager_was_killed_takes_nobody_else_for_it(tmp_path: Path) -> None:
    """Its fork server would outlive the block as a child of init."""
    manager = SPAWN.Process(target=manages, args=(tmp_path,))
    manager.start()
    wait_until((tmp_path / 'began').exists)
    manager.kill()
    manager.join()
    assert (
        wait_until(lambda: (tmp_path / 'told').exists() and (tmp_path / 'told').read_text())
        == f'{manager.pid}\n'
    )
