"""Throughput mode: torch's DistributedDataParallel, with every sample counting the same in uneven batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from parsl_freetrain.training.data import Turn
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.prepared import Prepared
from parsl_freetrain.training.sampling import GlobalBatch, split_for_ranks


class ThroughputSteps:
    """One turn per global batch, on this rank's part of it; optimizers and schedulers are the user's own."""

    def __init__(self, prepared: Prepared, peers: Peers, clip_grad_norm: float | None, find_unused_parameters: bool,
                 device: torch.device) -> None:
        self._prepared = prepared
        self._peers = peers
        self._device = device
        self._weight = 1.0
        self._decided: Callable[[], int] | None = None
        # Alone, a wish is decided at once; together at the end of the next batch, since the ranks compare
        # their wishes while that one is being trained.
        self.delay = 0 if peers.world_size == 1 else 1
        if clip_grad_norm is not None:
            for optimizer in prepared.optimizers:
                optimizer.register_step_pre_hook(_clipping(clip_grad_norm))
        self.models = tuple(self._wrapped(model, find_unused_parameters) for model in prepared.models)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizers, as they were given."""
        return self._prepared.optimizers

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """The schedulers, as they were given."""
        return self._prepared.schedulers

    def turns(self, batch: GlobalBatch) -> list[Turn]:
        """The one turn of this rank; a rank without a sample trains one that does not count, since DDP wants all ranks."""
        own = tuple(split_for_ranks(batch.indices, self._peers.world_size, self._peers.rank))
        weight = len(own) / len(batch.indices)
        return [Turn(own or batch.indices[:1], batch.samples_before, self._peers.rank, weight)]

    def begin(self, batch: GlobalBatch) -> None:
        """Before the turn of a global batch."""

    def begin_turn(self, turn: Turn) -> None:
        """Before the turn."""
        self._weight = turn.weight

    def end_turn(self) -> None:
        """After the turn."""

    def end(self, wish: int) -> int:
        """After the turn; returns the largest of all ranks' wishes, those of :attr:`delay` batches before."""
        if self._peers.world_size == 1:
            return wish
        decision = self._decided() if self._decided is not None else 0
        self._decided = self._peers.largest(wish, self._device)
        return decision

    def _wrapped(self, model: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
        if self._peers.world_size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapped = DistributedDataParallel(model, find_unused_parameters=find_unused_parameters)
        # DDP looks at annotations, and takes none that are texts, as all of this module's are.
        wrapped.register_comm_hook(None, lambda state, bucket: self._add_up(bucket))
        return wrapped

    def _add_up(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        gradient: torch.Tensor = bucket.buffer()
        if self._weight:
            gradient.mul_(self._weight)
        else:
            gradient.zero_()  # 0 x inf is not 0
        work = dist.all_reduce(gradient, async_op=True)
        assert work is not None
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed


def _clipping(norm: float) -> Callable[..., None]:
    def clip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group['params'] if p.grad is not None], norm)
    return clip
