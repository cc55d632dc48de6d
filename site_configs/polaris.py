"""Polaris at ALCF: nodes with 4 A100, PBS Pro.

Facts of 2026-08-19, from ALCF's guide (docs.alcf.anl.gov/polaris/running-jobs, a page of
2026-02-17, and the page "NCCL", of 2025-01-21); it has not been run there.
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
    # Routes to small, medium, large and their backfill-*; 10 jobs run, 100 wait, per project.
    'prod': QueueLimits(nodes=(10, 496), walltime_s=(300, 24 * 3600), jobs=100),
    'debug': QueueLimits(nodes=(1, 2), walltime_s=(300, 3600), jobs=1),
    'debug-scaling': QueueLimits(nodes=(1, 10), walltime_s=(300, 3600), jobs=1),
    # 2 jobs of a user wait or run, 1 runs.
    'capacity': QueueLimits(nodes=(1, 4), walltime_s=(300, 168 * 3600), jobs=2),
}
# With parsl-freetrain: 'conda activate my-environment'. PBS's own TMPDIR is too long for sockets.
CONDA = 'module use /soft/modulefiles\nmodule load conda\nconda activate\nexport TMPDIR=/tmp'
# ALCF's guide, "NCCL": the plugin by which NCCL uses the nodes' network, and its settings. If an
# application hangs in NCCL, leave the plugin out: nccl=''.
NCCL = """\
export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1 NCCL_COLLNET_ENABLE=1 NCCL_NET='AWS Libfabric'
export NCCL_SOCKET_IFNAME=hsn
export FI_CXI_DISABLE_HOST_REGISTER=1 FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072
plugin=/soft/libraries/hwloc/lib:/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib
LD_LIBRARY_PATH=$plugin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH"""


def site(
    account: str | None = None,
    queue: str = 'preemptable',
    filesystems: tuple[str, ...] = ('home', 'eagle'),
    worker_init: str = CONDA,
    nccl: str = NCCL,
    interface: str = 'hsn0',
    longest_s: float = 3 * 3600,
) -> PbsSite:
    """Blocks of at most ``longest_s`` seconds in ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    """
    limits = limits_of('Polaris', QUEUES, queue)
    return PbsSite(
        queue=queue,
        account=paying('Polaris', account, 'sbank-list-allocations lists yours'),
        filesystems=on_file_systems('Polaris', filesystems, FILE_SYSTEMS),
        node_resources={'system': 'polaris'},
        gpus_per_node=4,
        launch=PALS,
        worker_init=f'{worker_init}\n{nccl}'.rstrip(),
        interface=interface,  # or 'bond0'
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None, queue: str = 'preemptable', checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on Polaris.

    ``checkpoint_dir`` should be on Eagle.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue)), checkpoint_dir=checkpoint_dir
            )
        ]
    )
