"""Which GPUs a rank uses, and by what the ranks of a fragment exchange tensors. Has never run on a GPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

import torch

VISIBLE_VARIABLE = 'CUDA_VISIBLE_DEVICES'
GLOO = 'gloo'
GLOO_AND_NCCL = 'cpu:gloo,cuda:nccl'


def share_of(gpus: Sequence[str], local_rank: int, ranks_per_node: int) -> tuple[str, ...]:
    """A rank's part of its node's GPUs.

    As many for each rank as there are GPUs per rank, and in turn where there are more ranks than GPUs.

    Parameters
    ----------
    gpus
        As CUDA_VISIBLE_DEVICES names them.
    local_rank, ranks_per_node
        The rank among those of its node, from 0, and how many these are.
    """
    each = max(1, len(gpus) // ranks_per_node)
    first = local_rank * each % max(1, len(gpus))
    return tuple(gpus[first:first + each])


def backend_for(gpus: Sequence[str], *, nccl: bool) -> str:
    """What torch.distributed exchanges tensors by: those on CPUs by gloo, those on GPUs by NCCL if all ranks can, and else by gloo.

    Parameters
    ----------
    gpus
        By rank, what :func:`name_of` says. NCCL takes no two ranks on one GPU.
    nccl
        Whether this torch has NCCL.
    """
    return GLOO_AND_NCCL if nccl and all(gpus) and len(set(gpus)) == len(gpus) else GLOO


def take_gpus(local_rank: int, ranks_per_node: int) -> torch.device:
    """Leave this process its share of the GPUs that it may see, and give what it trains on: the first of them, or the CPU.

    To be called before anything in this process touches CUDA, which looks at CUDA_VISIBLE_DEVICES once. Where the variable is set
    already, by the block's environment or by Parsl, what it names is shared.
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
    """Which GPU of which host a device is; empty for a CPU, and for a part of a GPU (MIG), between which NCCL does not work."""
    if device.type != 'cuda' or os.environ.get(VISIBLE_VARIABLE, '').startswith('MIG-'):
        return ''
    return f'{platform.node()} {torch.cuda.get_device_properties(device).uuid}'


def _visible() -> list[str]:
    count = torch.cuda.device_count()   # asks the driver's NVML, which leaves CUDA untouched
    named = os.environ.get(VISIBLE_VARIABLE)
    return [str(i) for i in range(count)] if named is None else [name.strip() for name in named.split(',')][:count]
