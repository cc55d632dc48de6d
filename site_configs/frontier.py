"""Frontier at OLCF: nodes with 4 MI250X, which are 8 GPUs to Slurm and torch (ROCm), Slurm.

Facts of 2026-07-22, from OLCF's guide (docs.olcf.ornl.gov: "Frontier User Guide", "Scheduling
Policy", and "PyTorch on Frontier"); it has not been run there.
"""

from __future__ import annotations

from parsl.config import Config

from parsl_freetrain import BackfillProvider, FreeTrainExecutor, SlurmSite
from parsl_freetrain.sites.batch.limits import QueueLimits, limits_of, paying

# Nothing is preemptible. The longest walltime of a job depends on its number of nodes. 4 jobs of a
# user are considered at a time.
QUEUES = {
    'batch': QueueLimits((1, 91), (60, 2 * 3600), jobs=4, partition='batch'),
    'batch from 92 nodes': QueueLimits((92, 183), (60, 6 * 3600), jobs=4, partition='batch'),
    'batch from 184 nodes': QueueLimits((184, 9472), (60, 12 * 3600), jobs=4, partition='batch'),
    # 1 job of a user runs, and 1 is considered.
    'extended': QueueLimits((1, 64), (60, 24 * 3600), jobs=1),
}
MODULES = """\
module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 rccl-net-plugin
module load craype-accel-amd-gfx90a
export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH
. ~/venv/bin/activate"""
# "RCCL Network Plugin": the module sets what else is recommended. Only one of ROCR_VISIBLE_DEVICES
# (Slurm's) and CUDA_VISIBLE_DEVICES may be set. TMPDIR: sockets need a short path.
RCCL = """\
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3 NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1
export FI_CXI_RDZV_PROTO=alt_read FI_MR_CACHE_MONITOR=kdreg2
export TMPDIR=/tmp MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_JOB_ID
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
unset CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES"""


def site(
    account: str | None = None,
    queue: str = 'batch',
    worker_init: str = MODULES,
    rccl: str = RCCL,
    interface: str = 'hsn0',
    longest_s: float = 2 * 3600,
) -> SlurmSite:
    """Blocks of at most ``longest_s`` seconds in ``queue``.

    The project ``account`` pays; default: the environment variable FREETRAIN_ACCOUNT.
    """
    limits = limits_of('Frontier', QUEUES, queue)
    return SlurmSite(
        partition=limits.partition or queue,
        account=paying('Frontier', account, 'showusage lists yours'),
        gpus_per_node=8,
        worker_init=f'{worker_init}\n{rccl}'.rstrip(),
        # With FI_CXI_RDZV_PROTO=alt_read.
        sbatch_options=('--network=disable_rdzv_get',),
        interface=interface,
        poll_s=30.0,
        **limits.settings(longest_s),
    )


def config(
    account: str | None = None, queue: str = 'batch', checkpoint_dir: str = 'checkpoints'
) -> Config:
    """A Parsl configuration whose only executor trains on Frontier.

    ``checkpoint_dir`` should be on Orion.
    """
    return Config(
        executors=[
            FreeTrainExecutor(
                provider=BackfillProvider(site=site(account, queue)), checkpoint_dir=checkpoint_dir
            )
        ]
    )
