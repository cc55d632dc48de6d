"""Which GPUs a rank uses, and which backend exchanges the tensors of a fragment's ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch

VISIBLE_VARIABLE = 'CUDA_VISIBLE_DEVICES'
GLOO = 'gloo'
GLOO_AND_NCCL = 'cpu:gloo,cuda:nccl'


def share_of(gpus: Sequence[str], local_rank: int, ranks_per_node: int) -> tuple[str, ...]:
    """A rank's share of its node's GPUs.

    All ranks get the same number of GPUs. Where there are more ranks than GPUs, ranks share them in
    turn.

    Parameters
    ----------
    gpus
        As CUDA_VISIBLE_DEVICES names them.
    local_rank, ranks_per_node
        The rank's number on its node, from 0, and the number of ranks there.
    """
    each = max(1, len(gpus) // ranks_per_node)
    first = local_rank * each % max(1, len(gpus))
    return tuple(gpus[first : first + each])


def backend_for(gpus: Sequence[str], *, nccl: bool) -> str:
    """The backend of torch.distributed: gloo for tensors on CPUs; for those on GPUs NCCL if all
    ranks can use it, else gloo.

    Parameters
    ----------
    gpus
        What :func:`name_of` gives, by rank. NCCL does not allow two ranks on one GPU.
    nccl
        Whether this torch has NCCL.
    """
    return GLOO_AND_NCCL if nccl and all(gpus) and len(set(gpus)) == len(gpus) else GLOO


def take_gpus(local_rank: int, ranks_per_node: int) -> torch.device:
    """Restrict this process to its share of the visible GPUs. Returns the device to train on: the
    first of them, or the CPU.

    Call it before anything in this process uses CUDA, which reads CUDA_VISIBLE_DEVICES once. If the
    variable is already set, by the block's environment or by Parsl, the GPUs that it names are
    shared.
    """
    own = share_of(_visible(), local_rank, ranks_per_node)
    if own:
        os.environ[VISIBLE_VARIABLE] = ','.join(own)
    if not own or not torch.cuda.is_available():
        return torch.device('cpu')
    device = torch.device('cuda', 0)
    torch.cuda.set_device(device)
    torch.cuda.init()  # so that it can be seeded
    return device


def name_of(device: torch.device) -> str:
    """Host and identifier of a GPU; empty for a CPU and for a part of a GPU (MIG), which NCCL does
    not support.
    """
    if device.type != 'cuda' or os.environ.get(VISIBLE_VARIABLE, '').startswith('MIG-'):
        return ''
    return f'{platform.node()} {torch.cuda.get_device_properties(device).uuid}'


def _visible() -> list[str]:
    count = torch.cuda.device_count()  # asks NVML, which does not initialise CUDA
    named = os.environ.get(VISIBLE_VARIABLE)
    return (
        [str(i) for i in range(count)]
        if named is None
        else [name.strip() for name in named.split(',')][:count]
    )
