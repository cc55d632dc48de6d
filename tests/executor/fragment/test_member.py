"""What a worker knows of its manager, and the logs of ranks that a trainer keeps."""

import multiprocessing
import os
from pathlib import Path

import pytest

from parsl_freetrain.executor.fragment.member import prune_logs
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
    told = tmp_path / 'told'
    assert wait_until(lambda: told.exists() and told.read_text()) == f'{manager.pid}\n'


@pytest.mark.parametrize(('ranks', 'first', 'oldest'), [(1, 1, 201), (128, 1181, 1191)])
def test_old_logs_go_the_last_ones_stay(
    tmp_path: Path, ranks: int, first: int, oldest: int
) -> None:
    (tmp_path / 'notes').touch()
    for fragment in range(first, 1201):
        for rank in range(ranks):
            (tmp_path / f'fragment-{fragment:06d}-rank-{rank}.log').touch()
    (tmp_path / f'ahead-of-{first:06d}-n0-0.log').touch()
    prune_logs(tmp_path, 1200)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept[0] == f'fragment-{oldest:06d}-rank-0.log' and kept[-1] == 'notes'
    assert len(kept) - 1 == ranks * (1201 - oldest)
