"""Any machine with Slurm: fill the holes of a partition between the jobs of others. Copy and change."""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain.executor import FreeTrainExecutor
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.sites.slurm import SlurmSite


def config(partition: str = 'batch', account: str | None = None, checkpoint_dir: str = 'checkpoints') -> Config:
    """A Parsl configuration whose only executor trains in the holes of ``partition``."""
    site = SlurmSite(
        partition=partition,
        account=account,
        # What each node needs before Python starts:
        worker_init='',     # 'module load python; source ~/venv/bin/activate'
        # A block where nothing is planned takes this long at most, in seconds; whoever comes meanwhile waits for its end.
        longest_s=1800,
        # The network that ranks talk over, and whether nodes of different blocks can reach each other:
        interface=None,     # 'ib0'
        spans_blocks=True,
    )
    return Config(
        executors=[FreeTrainExecutor(provider=BackfillProvider(site=site), checkpoint_dir=checkpoint_dir)],
        strategy='none',  # the executor opens and closes its blocks itself
    )
