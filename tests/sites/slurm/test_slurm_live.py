"""A preempted training on a real Slurm cluster, and two runs of two users, whose nodes jobs need.
Dead nodes are in slurm/test_whole_training.py.
"""

from pathlib import Path

import pytest

from parsl_freetrain import Checkpoints, freetrain_app
from parsl_freetrain.journal.read import Journal
from tests.sites.giving import LASTS, two_users
from tests.sites.slurm.conftest import slurm_site
from tests.slurm.experiment import SlurmMachine
from tests.support.other_user import needs_root
from tests.support.slurm import Cluster
from tests.support.training import fit, freetrain
from tests.support.waiting import under_load, wait_until

pytestmark = pytest.mark.slurm


@pytest.mark.long
def test_a_preempted_block_loses_no_step(slurm: Cluster, tmp_path: Path) -> None:
    """A wide job takes the nodes; the checkpoint comes in the grace time, nothing is repeated."""
    keep = Checkpoints(every_s=1e3)
    trainer = freetrain_app(max_nodes=1, total_epochs=10**6, checkpoints=keep)(fit)
    site = slurm_site('scavenger', mode='preemptible')
    with freetrain(tmp_path, site, address='127.0.0.1') as executor:
        future = trainer(pause_s=0.1)
        wait_until(lambda: future.progress().samples)
        wide = slurm.submit('--nodes=4', '--time=1', '--partition=batch', seconds=2)
        slurm.wait(lambda: slurm.state(wide) == 'COMPLETED')
        wait_until(lambda: future.progress().fragments > 1)
        kept = future.checkpoint
        assert kept is not None and kept.samples > 0
        wait_until(lambda: future.progress().samples > kept.samples)
        future.cancel()
    with Journal(executor.ledger_path) as ledger:
        history = ledger.history()
    fragments = history.fragments
    assert len(fragments) >= 2
    assert fragments[0].ending == 'stopped'
    assert fragments[0].samples == fragments[0].reached == fragments[1].launched.samples


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
