"""Two runs on one partition, of one user and of two: a job that needs nodes of both gets them, and
one that needs a node of either gets it from one of them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event

import pytest

from tests.slurm.experiment import Filler, SlurmMachine
from tests.slurm.giving import give
from tests.support.other_user import OTHER, as_other_user, needs_root
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm


@contextmanager
def folders(*owners: int) -> Iterator[list[Path]]:
    """Of these users, where each may write."""
    with tempfile.TemporaryDirectory(prefix='ft-', dir='/tmp', ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        made = [Path(name, str(number)) for number in range(len(owners))]
        for folder, owner in zip(made, owners, strict=True):
            folder.mkdir()
            os.chown(folder, owner, -1)
        yield made


@contextmanager
def trainings(cluster: Cluster) -> Iterator[None]:
    """Two programs of one user, each with two nodes."""
    fillers: list[Filler] = []
    try:
        with folders(os.geteuid(), os.geteuid()) as made:
            for folder in made:
                settings = {'partition': 'batch', 'longest_s': 1200.0, 'start_s': 3.0}
                fillers.append(Filler(SlurmMachine(cluster, 4), folder, settings))
                fillers[-1].begin(2, 2)
            yield
    finally:
        for filler in fillers:
            filler.kill()


@contextmanager
def two_users(cluster: Cluster) -> Iterator[None]:
    """The sites of two users, each with two blocks, that give back what they do not train on: the
    other user may not read this Python.
    """
    over = Event()
    with folders(os.geteuid(), OTHER) as (own, other), ThreadPoolExecutor() as pool:
        try:
            with as_other_user(lambda: give(other, over)):
                cluster.wait(lambda: (other / 'runs').exists())
                giving = pool.submit(give, own, over)
                cluster.wait(lambda: giving.done() or (own / 'runs').exists())
                yield
        finally:
            over.set()
    giving.result()


@needs_root
@pytest.mark.parametrize('runs', [trainings, two_users])
def test_a_job_that_needs_nodes_of_two_runs_gets_them(
    slurm: Cluster, runs: Callable[[Cluster], AbstractContextManager[None]]
) -> None:
    with runs(slurm):
        machine = SlurmMachine(slurm, 4)
        blocks = set(slurm.run('squeue', '-h', '-t', 'R', '-o', '%i').split())
        narrow = slurm.submit('--nodes=1', '--time=1', seconds=15)
        slurm.wait(lambda: slurm.run('squeue', '-h', '-t', 'R', '-n', 'wrap'))
        going = slurm.run('squeue', '-h', '-t', 'R', '-o', '%i').split()
        assert len(blocks.intersection(going)) >= len(blocks) - 1, 'one of them gave, not both'
        wide = slurm.submit('--nodes=4', '--time=1', seconds=1)
        slurm.wait(lambda: slurm.state(wide) == 'COMPLETED')
        [end] = [row.end for row in machine.rows() if row.job == narrow]
        [start] = [row.start for row in machine.rows() if row.job == wide]
        print(f'the wide job waited {start - end:.0f} s for blocks')
        assert start - end <= under_load(20.0), 'their blocks would end much later'
