"""Crux at ALCF: nodes with 128 cores and no GPU, PBS Pro.

Facts of 2026-08-19, from ALCF's guide
(docs.alcf.anl.gov/crux/queueing-and-running-jobs/running-jobs, a page of 2025-06-30); it has not
been run there.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, PbsSite
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, on_file_systems, paying
from parsl_freetrain.sites.pbspro import PALS

FILE_SYSTEMS = ('home', 'eagle', 'flare', 'grand', 'swift')
QUEUES = {
    'preemptable': QueueLimits(
        nodes=(1, 10), walltime_s=(300, 72 * 3600), jobs=20, preemptible=True
    ),
    # Routes to workq; 100 jobs per project.
    'workq-route': QueueLimits(nodes=(1, 184), walltime_s=(300, 24 * 3600), jobs=100),
    'debug': QueueLimits(nodes=(1, 8), walltime_s=(300, 2 * 3600), jobs=1),
}
# There is no module with torch: give worker_init with an environment of your own, and this. PBS's
# own TMPDIR is too long for sockets; by default there would be 256 OpenMP threads.
SETTINGS = 'export TMPDIR=/tmp OMP_NUM_THREADS=128'


def site(
    account: str | None = None,
    queue: str = 'preemptable',
    filesystems: tuple[str, ...] = ('home', 'eagle'),
    worker_init: str = '. ~/venv/bin/activate',
    interface: str = 'hsn0',
    longest_s: float = 3 * 3600,
) -> PbsSite:
    """Blocks of at most ``longest_s`` seconds in ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    """
    limits = limits_of('Crux', QUEUES, queue)
    return PbsSite(
        queue=queue,
        account=paying('Crux', account, 'sbank-list-allocations lists yours'),
        filesystems=on_file_systems('Crux', filesystems, FILE_SYSTEMS),
        node_resources={'system': 'crux'},
        launch=PALS,
        worker_init=f'{worker_init}\n{SETTINGS}',
        interface=interface,  # or 'bond0'
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None, queue: str = 'preemptable', checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on Crux.

    ``checkpoint_dir`` should be on Eagle.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue)), checkpoint_dir=checkpoint_dir
            )
        ]
    )
