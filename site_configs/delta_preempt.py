"""Delta at NCSA: A100 nodes that may be preempted.

Written with the names of Delta's user guide; it has not been run there.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, SlurmSite
from parsl_freetrain.sites.slurm import Mode


def config(account: str = 'YOUR-delta-gpu', checkpoint_dir: str = 'checkpoints') -> Config:
    """A Parsl configuration whose only executor trains on preemptible nodes.

    ``checkpoint_dir`` should be on /scratch.
    """
    site = SlurmSite(
        partition='gpuA100x4-preempt',
        mode=Mode.PREEMPTIBLE,
        account=account,
        constraint='scratch',
        gpus_per_node=4,
        requeue=True,  # a preempted block goes back to the queue
        longest_s=8 * 3600,
        worker_init='',  # 'source ~/venv/bin/activate'
        interface='hsn0',
    )
    return Config(
        executors=[
            FreeTrainExecutor(provider=BackfillProvider(site=site), checkpoint_dir=checkpoint_dir)
        ],
        strategy='none',  # the executor opens and closes its blocks itself
    )
