"""Two runs of two users: jobs that need nodes of both get them, or of either from one."""

import pytest

from tests.sites.giving import LASTS, two_users
from tests.sites.slurm.conftest import slurm_site
from tests.slurm.experiment import SlurmMachine
from tests.support.other_user import needs_root
from tests.support.slurm import Cluster
from tests.support.waiting import under_load

pytestmark = pytest.mark.slurm


@needs_root
def test_a_job_that_needs_nodes_of_two_runs_gets_them(slurm: Cluster) -> None:
    with two_users(slurm, lambda: slurm_site(**LASTS)):
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
