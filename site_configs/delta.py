"""Delta at NCSA: nodes with 4 A100 or 4 A40, Slurm; partitions whose jobs may be preempted.

Facts of 2025-05-28, from NCSA's guide (docs.ncsa.illinois.edu/systems/delta: "Running Jobs", a page
of 2025-04-22, and "Job Accounting"); it has not been run there.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, SlurmSite
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, paying

DAYS_2 = (60, 48 * 3600)
# The guide says "TBD" for the nodes of a job and for the jobs of a user: 100 and 4 are our own
# guess. A service unit is an hour of one GPU, times the partition's factor. A preemptible job runs
# for 10 minutes at least (the guide's text; the output that it shows beside it, PreemptExemptTime =
# 10:00:00, would be ten hours), and has 300 s from SIGTERM to SIGKILL.
QUEUES = {
    'gpuA100x4-preempt': QueueLimits(
        (1, 100), DAYS_2, jobs=4, preemptible=True, exempt_s=600, price=4 * 0.5
    ),
    'gpuA40x4-preempt': QueueLimits(
        (1, 100), DAYS_2, jobs=4, preemptible=True, exempt_s=600, price=4 * 0.25
    ),
    'gpuA100x4': QueueLimits((1, 100), DAYS_2, jobs=4, price=4 * 1.0),
    'gpuA40x4': QueueLimits((1, 100), DAYS_2, jobs=4, price=4 * 0.5),
}
# "Running Jobs", the example for several nodes. TMPDIR: sockets need a short path.
NCCL = 'export NCCL_SOCKET_IFNAME=hsn TMPDIR=/tmp'


def site(
    account: str | None = None,
    queue: str = 'gpuA100x4-preempt',
    constraint: str = 'scratch',
    worker_init: str = '. ~/venv/bin/activate',
    nccl: str = NCCL,
    interface: str = 'hsn0',
    longest_s: float = 8 * 3600,
) -> SlurmSite:
    """Blocks of at most ``longest_s`` seconds in the partition ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    ``constraint``: the file systems that the job needs.
    """
    limits = limits_of('Delta', QUEUES, queue)
    return SlurmSite(
        partition=queue,
        account=paying('Delta', account, 'the command accounts lists yours'),
        constraint=constraint or None,
        gpus_per_node=4,
        requeue=limits.preemptible,  # Delta requeues only the jobs that ask for it
        worker_init=f'{worker_init}\n{nccl}'.rstrip(),
        interface=interface,
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None,
    queue: str = 'gpuA100x4-preempt',
    checkpoint_dir: str = 'checkpoints',
) -> Config:
    """A Parsl configuration whose only executor trains on Delta.

    ``checkpoint_dir`` should be on /work/hdd.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue)), checkpoint_dir=checkpoint_dir
            )
        ]
    )
