"""Aurora at ALCF: nodes with 6 GPUs of 2 tiles each (torch.xpu, xccl), PBS Pro.

Facts of 2026-08-19, from ALCF's guide
(docs.alcf.anl.gov/aurora/running-jobs-aurora); it has not been run there.
"""

from __future__ import annotations

import os

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, PbsSite
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, needed
from parsl_freetrain.sites.pbspro import PALS

QUEUES = {
    # Nothing is preemptable here. 2 jobs of a user run, 5 wait or run.
    'capacity': QueueLimits(nodes=(1, 16), walltime_s=(300, 168 * 3600), jobs=5),
    # Routes to small, medium, large and their backfill-*; 10 jobs run, 100 wait, per project.
    'prod': QueueLimits(nodes=(256, 10624), walltime_s=(300, 24 * 3600), jobs=100),
    'debug': QueueLimits(nodes=(1, 2), walltime_s=(300, 3600), jobs=1),
    'debug-scaling': QueueLimits(nodes=(2, 256), walltime_s=(300, 3600), jobs=1),
}
# Then '. my-environment/bin/activate', with parsl-freetrain. PBS's own TMPDIR is too long for
# sockets.
FRAMEWORKS = 'module load frameworks\nexport TMPDIR=/tmp'


def site(
    account: str | None = None,
    queue: str = 'capacity',
    filesystems: tuple[str, ...] = ('home', 'flare'),
    worker_init: str = FRAMEWORKS,
    interface: str = 'hsn0',
    longest_s: float = 3 * 3600,
) -> PbsSite:
    """Blocks of at most ``longest_s`` seconds in ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    """
    limits = limits_of('Aurora', QUEUES, queue)
    account = needed(
        'Aurora',
        'an account',
        account or os.environ.get('FREETRAIN_ACCOUNT'),
        'give account="PROJECT", or set FREETRAIN_ACCOUNT; sbank-list-allocations names yours',
    )
    needed(
        'Aurora',
        'its file systems',
        ':'.join(filesystems),
        'give filesystems=("home", "flare") or those that your files are on',
    )
    return PbsSite(
        queue=queue,
        account=account,
        filesystems=filesystems,
        launch=PALS,
        worker_init=worker_init,
        interface=interface,  # or 'bond0'
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None, queue: str = 'capacity', checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on Aurora.

    ``checkpoint_dir`` should be on Flare.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue)), checkpoint_dir=checkpoint_dir
            )
        ],
        strategy='none',  # the executor opens and closes its blocks itself
    )
