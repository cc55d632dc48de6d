"""Perlmutter at NERSC: nodes with 4 A100, Slurm; a QOS whose jobs may be preempted.

Facts of "Queues and Charges" (docs.nersc.gov/jobs/policy), as known on 2026-11-22: only the
beginning of that page could be read, which has no table of limits, and NERSC's guide is in no
public repository. The two hours are from a user's batch script of 2026. Compare before you rely on
them. It has not been run there.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, SlurmSite
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, needed, paying

HOURS_2 = 2 * 3600
# Queues are QOS here. 5000 jobs may be submitted.
QUEUES = {
    # Not preempted in its first 2 hours, which are charged in full, also if it ends before; then a
    # quarter. Requests for less than 2 hours are refused.
    'preempt': QueueLimits(
        (1, 128),
        (HOURS_2, 48 * 3600),
        jobs=5000,
        preemptible=True,
        exempt_s=HOURS_2,
        price=0.25,
        least_s=HOURS_2,
        least_price=1.0,
    ),
    'regular': QueueLimits((1, 1536), (60, 48 * 3600), jobs=5000),
}
# Module pytorch sets NCCL up for the nodes' network. TMPDIR: sockets need a short path.
MODULES = 'module load pytorch\n. ~/venv/bin/activate\nexport NCCL_SOCKET_IFNAME=hsn TMPDIR=/tmp'


def site(
    account: str | None = None,
    queue: str = 'preempt',
    partition: str | None = None,
    worker_init: str = MODULES,
    interface: str = 'hsn0',
    longest_s: float = 8 * 3600,
) -> SlurmSite:
    """Blocks of at most ``longest_s`` seconds in the QOS ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    ``partition``: where NERSC puts such jobs. Its name is not in the guide.
    """
    limits = limits_of('Perlmutter', QUEUES, queue)
    return SlurmSite(
        partition=needed(
            'Perlmutter',
            'its partition',
            partition,
            'give partition= as squeue --qos=QUEUE --format=%P shows it for jobs of this QOS',
        ),
        qos=queue,
        account=paying('Perlmutter', account, 'iris.nersc.gov lists yours'),
        constraint='gpu',
        gpus_per_node=4,
        requeue=limits.preemptible,
        worker_init=worker_init,
        interface=interface,
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None,
    queue: str = 'preempt',
    partition: str | None = None,
    checkpoint_dir: str = 'checkpoints',
) -> Config:
    """A Parsl configuration whose only executor trains on Perlmutter.

    ``checkpoint_dir`` should be on $SCRATCH.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue, partition)),
                checkpoint_dir=checkpoint_dir,
            )
        ]
    )
