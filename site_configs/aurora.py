"""Aurora at ALCF: nodes with 6 GPUs of 2 tiles each (torch.xpu, xccl), PBS Pro.

Facts of 2026-08-19, from ALCF's guide
(docs.alcf.anl.gov/aurora/running-jobs-aurora, a page of 2026-07-27); it has not been run there.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, PbsSite
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, on_file_systems, paying
from parsl_freetrain.sites.pbspro import PALS

FILE_SYSTEMS = ('home', 'flare', 'daos_user_fs', 'daos_perf_fs')
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
# The page "oneCCL" of the guide (of 2026-03-17, which calls its settings experimental), but for the
# first two, which are our own choice: there they are for ranks that mpiexec starts (pmix, mpi, and
# CCL_KVS_MODE=mpi, which is left out), and ours find each other by torch's store.
CCL = """\
export CCL_PROCESS_LAUNCHER=none CCL_ATL_TRANSPORT=ofi CCL_KVS_CONNECTION_TIMEOUT=600
export CCL_ZE_CACHE_OPEN_IPC_HANDLES_THRESHOLD=1024 FI_MR_CACHE_MONITOR=userfaultfd"""


def site(
    account: str | None = None,
    queue: str = 'capacity',
    filesystems: tuple[str, ...] = ('home', 'flare'),
    worker_init: str = FRAMEWORKS,
    ccl: str = CCL,
    interface: str = 'hsn0',
    longest_s: float = 3 * 3600,
) -> PbsSite:
    """Blocks of at most ``longest_s`` seconds in ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    """
    limits = limits_of('Aurora', QUEUES, queue)
    return PbsSite(
        queue=queue,
        account=paying('Aurora', account, 'sbank-list-allocations lists yours'),
        filesystems=on_file_systems('Aurora', filesystems, FILE_SYSTEMS),
        launch=PALS,
        worker_init=f'{worker_init}\n{ccl}'.rstrip(),
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
        ]
    )
