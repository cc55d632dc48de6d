"""Theta at ALCF: KNL nodes with 64 cores, Cobalt.

Theta was retired in 2023. This is for Cobalt machines like it, and has never been run.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, CobaltSite, FreeTrainExecutor
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, paying

CORES = 64
QUEUES = {
    # Longer walltimes from 256 nodes on.
    'default': QueueLimits(nodes=(128, 4392), walltime_s=(1800, 3 * 3600), jobs=20),
    'debug-cache-quad': QueueLimits(nodes=(1, 8), walltime_s=(300, 3600), jobs=1),
    'debug-flat-quad': QueueLimits(nodes=(1, 8), walltime_s=(300, 3600), jobs=1),
}
# Training on CPUs: one thread bound to each core; threads do not spin while they wait for data.
THREADS = (
    f'export OMP_NUM_THREADS={CORES} MKL_NUM_THREADS={CORES} KMP_BLOCKTIME=0 '
    "KMP_AFFINITY='granularity=fine,compact,1,0'\nexport MKL_ENABLE_INSTRUCTIONS=AVX512_MIC"
)


def site(
    account: str | None = None,
    queue: str = 'default',
    filesystems: tuple[str, ...] = ('home', 'theta-fs0'),
    worker_init: str = 'module load miniconda-3',
    interface: str = 'ipogif0',
    longest_s: float = 3 * 3600,
) -> CobaltSite:
    """Blocks of at most ``longest_s`` seconds in ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    """
    limits = limits_of('Theta', QUEUES, queue)
    return CobaltSite(
        queue=queue,
        account=paying('Theta', account, 'sbank lists yours'),
        mcdram='flat' if 'flat' in queue else 'cache',
        numa='quad',
        filesystems=filesystems,
        worker_init=f'{worker_init}\n{THREADS}',
        aprun_options=('-d', str(CORES), '-j', '1', '-cc', 'depth'),
        interface=interface,
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None, queue: str = 'default', checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on Theta.

    ``checkpoint_dir`` should be on theta-fs0.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue)), checkpoint_dir=checkpoint_dir
            )
        ]
    )
