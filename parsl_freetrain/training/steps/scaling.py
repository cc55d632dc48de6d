"""Gradient scalers where a body sees a part of the global batch: they act once, on its gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared


class ScalerOnce(torch.amp.GradScaler):
    """Put over the class of a scaler, which the function holds. While it ``waits``, in the body,
    optimizers hand over gradients of scaled losses, and whatever else it is told is left to the
    end of the global batch. So all of it has one scale, and its gradient, in which the scaler looks
    for infinities, is the same on all ranks.
    """

    _scale: Any
    _per_optimizer_states: Any
    differ: Callable[[torch.optim.Optimizer], bool]  # whether ranks see gradients of their own
    waits = False
    stepping = updated = False  # its step() runs in the body; update() was called in this iteration

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.waits:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.waits:
            if self._per_optimizer_states[id(optimizer)]['stage'] is OptState.READY:
                self.unscale_(optimizer)  # fused ones would do it behind what clips or reads them
            return super().step(optimizer, *args, **kwargs)
        self.stepping = True
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self.stepping = False

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        found = super()._unscale_grads_(optimizer, *args)
        if self.differ(optimizer):
            found = found or {self._scale.device: torch.zeros_like(self._scale)}
            for infinite in found.values():
                dist.all_reduce(infinite, dist.ReduceOp.MAX)
        return found

    def step_now(self, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        """In the last micro-batch's step, where the optimizer has the gradient of all."""
        self.waits = False
        self.step(optimizer, **options)
        self.waits = True

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if not self.waits:
            super().update(new_scale)
            return
        if new_scale is not None or self.updated:
            raise BadInput(
                'scaler.update was called twice in one iteration of ctx.loop, or with a new scale, '
                'but a global batch has one scale: call it once, after the last step (a gradient '
                'scaler for each optimizer has its own), and set another scale in '
                'ctx.after_step(fn).'
            )
        self.updated = True

    def get_scale(self) -> float:
        if self.waits and self.updated:
            raise BadInput(
                'scaler.get_scale() was called after scaler.update() in the body of ctx.loop, '
                'which takes effect at the end of the global batch: call it before, or in '
                'ctx.after_step(fn), as well as scheduler.step() where that depends on it.'
            )
        return super().get_scale()


def once(prepared: Prepared, differ: Callable[[torch.optim.Optimizer], bool]) -> list[ScalerOnce]:
    """Have the scalers that are enabled act once per global batch."""
    found: Any = [scaler for scaler in prepared.scalers if scaler.is_enabled()]
    for scaler in found:
        kind = type(scaler)
        own = {'__module__': kind.__module__}
        scaler.__class__ = type(kind.__name__, (ScalerOnce, kind), own)
        scaler.differ = differ
        # It makes its numbers with the first loss, and a rank may have none in a short batch.
        scaler.scale(torch.zeros((), device=prepared.tensors()[0].device))
    return list(found)


def stepping(scalers: Sequence[ScalerOnce]) -> ScalerOnce | None:
    """The one whose step called the optimizer's."""
    return next((scaler for scaler in scalers if scaler.stepping), None)
