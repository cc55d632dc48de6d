"""Batch normalisation of divided volumes, over all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parsl_freetrain.training.parallel.spatial.grid import Axis
from parsl_freetrain.training.parallel.spatial.sharded_volume import Sharded, shared

_OVER = (0, 2, 3, 4)


class BatchNorm3d(nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` for :class:`.Sharded`: the statistics are those of whole volumes.

    Parameters
    ----------
    over_data
        Whether the statistics are those of the whole global batch, as in
        ``torch.nn.SyncBatchNorm``, or those of the samples that the ranks of one spatial group
        share. The gradient is exact only if all groups have the same number of samples.
    """

    def __init__(self, *args: Any, over_data: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.over_data = over_data

    def forward(self, x: Sharded) -> Sharded:  # type: ignore[override]
        over = [*x.grid.axes, *([x.grid.data] if self.over_data else [])]
        axes = [axis for axis in over if axis.parts > 1]
        weight, bias = shared(x.grid, self.weight, self.bias)
        if not self.training and self.running_mean is not None:
            means = self.running_mean, self.running_var
            return replace(x, local=F.batch_norm(x.local, *means, weight, bias, eps=self.eps))
        with torch.no_grad():
            count, mean, variance = statistics(x.local, axes)
            if self.training:
                self._note(count, mean, variance)
        local = _Normalise.apply(x.local, weight, bias, mean, variance, count, axes, self.eps)  # type: ignore[no-untyped-call]
        return replace(x, local=local)

    def _note(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        means, variances, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if means is None or variances is None or batches is None:
            return
        batches.add_(1)
        momentum = 1 / float(batches) if self.momentum is None else self.momentum
        means.lerp_(mean.to(means.dtype), momentum)
        variances.lerp_((variance * count / (count - 1)).to(variances.dtype), momentum)


def statistics(x: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor, Tensor]:
    """Number of a channel's values on all ranks of ``axes``, mean and (biased) variance, in double
    precision, combined as by Chan, Golub and LeVeque (Stanford STAN-CS-79-773, 1979).
    """
    variance, mean = (value.double() for value in torch.var_mean(x, _OVER, correction=0))
    count = mean.new_tensor([x.numel() / x.shape[1]])
    for axis in axes:
        own = torch.cat([count, mean, variance])[None]
        rows = torch.stack(axis.gather(own, (1,) * axis.parts, 0))[:, 0]
        counts, means, variances = rows.split([1, len(mean), len(mean)], 1)
        count = counts.sum(0)
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return count, mean, variance


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        axes: Sequence[Axis],
        eps: float,
    ) -> Tensor:
        mean, scale = mean.to(x.dtype), (variance + eps).rsqrt().to(x.dtype)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.axes = axes
        return F.batch_norm(x, mean, variance.to(x.dtype), weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        gradient = gradients[0]
        normal = (x - _channels(mean)) * _channels(scale)
        of_bias, of_weight = gradient.sum(_OVER), (gradient * normal).sum(_OVER)
        sums = torch.cat([of_bias, of_weight])
        for axis in ctx.axes:
            sums = axis.add(sums)
        means = (sums / count.to(sums.dtype)).split(len(mean))
        factor = scale if weight is None else scale * weight
        of_x = (gradient - _channels(means[0]) - normal * _channels(means[1])) * _channels(factor)
        of_both = (of_weight, of_bias) if weight is not None else (None, None)
        return of_x, *of_both, *(None,) * 5


def _channels(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1, 1)
