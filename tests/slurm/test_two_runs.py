"""Two runs on one partition, of one user and of two: a job that needs nodes of both gets them, and
one that needs a node of either gets it from one of them.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.sites.giving import LASTS, folders, two_users
from tests.sites.slurm.conftest import slurm_site
from tests.slurm.experiment import Filler, SlurmMachine
from tests.support.other_user import needs_root
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm


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


def users(cluster: Cluster) -> AbstractContextManager[None]:
    return two_users(cluster, lambda: slurm_site(**LASTS))


@needs_root
@pytest.mark.parametrize('runs', [pytest.param(trainings, marks=pytest.mark.long), users])
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
