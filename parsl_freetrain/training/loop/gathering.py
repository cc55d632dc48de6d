"""``ctx.all_gather``: a tensor of all ranks, for losses over all samples of a global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.spec.training import TrainingSpec
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.modes import Steps


def all_gather(
    tensor: torch.Tensor, spec: TrainingSpec, division: Division, steps: Steps, peers: Peers
) -> torch.Tensor:
    """The rows of all ranks, in order of rank. Raises BadInput where a pass has not all samples."""
    if isinstance(spec.mode, Reproducible):
        if spec.shards == 1:
            return tensor
        raise BadInput(
            f'ctx.all_gather was called in reproducible mode with {spec.shards} virtual shards, '
            'which are trained one after the other, each with its own samples only: use '
            'mode=Throughput(), or Reproducible(shards=1) on one rank.'
        )
    weight = getattr(steps, 'whole_weight', None)
    if weight is None or division.shape.data != peers.world_size:
        raise BadInput(
            'ctx.all_gather needs ranks that hold whole models, and one pass for each global '
            'batch: leave out micro_batch and shapes.'
        )
    if peers.world_size == 1:
        return tensor
    rows = len(tensor) if weight else 0
    sizes = [int(one) for one in gather_bytes(peers, str(rows).encode(), 12)]
    # Every rank computes the same loss, and DDP takes the mean of what they weigh by their samples.
    factor = 1 / (weight * peers.world_size) if weight else 0.0
    gather: Any = _AllGather.apply
    found: torch.Tensor = gather(tensor, sizes, peers.rank, division.data_group, factor)
    return found


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, sizes: list[int], rank: int, group: Any, factor: float
    ) -> torch.Tensor:
        ctx.of = sizes, rank, group, factor, tensor.shape
        own = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        own[: sizes[rank]] = tensor[: sizes[rank]]
        every = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(every, own, group=group)
        return torch.cat([one[:size] for one, size in zip(every, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sizes, rank, group, factor, shape = ctx.of
        total = grads[0].contiguous()
        dist.all_reduce(total, group=group)
        first, own = sum(sizes[:rank]), total.new_zeros(shape)
        own[: sizes[rank]] = total[first : first + sizes[rank]] * factor
        return own, None, None, None, None
