"""Any machine with Slurm: fills the holes between the jobs of others. Copy this and change it."""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, SlurmSite


def config(
    partition: str = 'batch', account: str | None = None, checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains in the holes of ``partition``."""
    site = SlurmSite(
        partition=partition,
        account=account,
        # Shell lines that make Python ready:
        worker_init='',  # 'module load python; source ~/venv/bin/activate'
        # Length of a block in seconds if nothing is planned. Jobs that come meanwhile get its nodes
        # within seconds; they wait for its end only if this process is gone.
        longest_s=300,
        # The network that ranks use, and whether nodes of different blocks can reach each other:
        interface=None,  # 'ib0'
        spans_blocks=True,
    )
    return Config(
        executors=[
            FreeTrainExecutor(provider=BackfillProvider(site=site), checkpoint_dir=checkpoint_dir)
        ]
    )
