"""Convolutions, pooling and batch normalisation of divided volumes, with torch's arguments."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.spatial import grid as halo
from parsl_freetrain.training.parallel.spatial.geometry import TransposedWindow
from parsl_freetrain.training.parallel.spatial.grid import Axis, Grid
from parsl_freetrain.training.parallel.spatial.sharded_volume import Sharded, shared

Triple = tuple[int, ...]


class Conv3d(nn.Conv3d):
    """``torch.nn.Conv3d`` for :class:`.Sharded`, with zeros as padding at the borders of the
    volume. Raises BadInput for other padding; in ``forward`` if a part of the output would be
    empty, or the halo wider than the neighbouring part.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.padding, str) or self.padding_mode != 'zeros':
            raise BadInput(
                f'A convolution of divided volumes was given padding={self.padding!r}, '
                f'padding_mode={self.padding_mode!r}: give '
                f"padding as numbers, and leave padding_mode at 'zeros'."
            )

    def forward(self, x: Sharded) -> Sharded:  # type: ignore[override]
        numbers = self.kernel_size, self.stride, self.padding, self.dilation
        layout, needed, padding = halo.plan_window(x.layout, x.grid, *numbers)
        weight, bias = shared(x.grid, self.weight, self.bias)
        options = self.stride, padding, self.dilation, False, (0, 0, 0), self.groups
        local = _Convolution.apply(x.local, weight, bias, needed, x.grid, options)  # type: ignore[no-untyped-call]
        return Sharded(local, layout, x.grid)


class ConvTranspose3d(nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d`` for :class:`.Sharded`; refuses input as :class:`Conv3d`."""

    def forward(self, x: Sharded, like: Sharded | None = None) -> Sharded:  # type: ignore[override]
        """``like``: the output has its extents and parts, which must be possible."""
        more = self._output_paddings(x, like)
        each = zip(self.kernel_size, self.stride, self._paddings, self.dilation, more, strict=True)
        spreads = [TransposedWindow(*numbers) for numbers in each]
        of_like = like.layout if like is not None else None
        layout, needed = halo.plan(spreads, x.layout, x.grid, of_like)
        weight, bias = shared(x.grid, self.weight, self.bias)
        assert weight is not None
        # The full output for this input, from which this rank's part is cut.
        output_padding = [spread.output_padding for spread in spreads]
        whole = halo.fetch(x.local, needed, x.grid)
        how = self.stride, 0, output_padding, self.groups, self.dilation
        local = F.conv_transpose3d(whole, weight, bias, *how)
        for i, (spread, own) in enumerate(zip(spreads, x.grid.own(layout), strict=True)):
            begins_at = spread.need(own.start, own.stop)[0] if needed[i] is not None else 0
            at = own.start - (begins_at * spread.stride - spread.padding)
            local = local.narrow(halo.FIRST + i, at, own.stop - own.start)
        return replace(x, local=local, layout=layout)

    @property
    def _paddings(self) -> Triple:
        assert not isinstance(self.padding, str)
        return self.padding

    def _output_paddings(self, x: Sharded, like: Sharded | None) -> Triple:
        if like is None:
            return self.output_padding
        found = []
        for i, (bounds, wanted) in enumerate(zip(x.layout, like.layout, strict=True)):
            smallest = TransposedWindow(
                self.kernel_size[i], self.stride[i], self._paddings[i], self.dilation[i]
            ).extent(bounds[-1])
            more, most = wanted[-1] - smallest, max(self.stride[i], self.dilation[i]) - 1
            if not 0 <= more <= most:
                raise BadInput(
                    f'A transposed convolution makes {smallest} to {smallest + most} positions of '
                    f'{bounds[-1]}, and was asked for {wanted[-1]}, like those of another volume.'
                )
            found.append(more)
        return tuple(found)


class _Convolution(torch.autograd.Function):
    """Keeps a part and its halo separately until backward; torch would keep a joined copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needed: halo.Moves,
        grid: Grid,
        options: tuple[Any, ...],
    ) -> Tensor:
        whole, got = halo.collect(x, needed, grid)
        ctx.save_for_backward(x, weight, *got)
        ctx.needed, ctx.grid, ctx.options = needed, grid, options
        ctx.bias_shape = None if bias is None else list(bias.shape)
        return torch.convolution(whole, weight, bias, *ctx.options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *got = ctx.saved_tensors
        whole, _ = halo.collect(x, ctx.needed, ctx.grid, got=got)
        of_whole, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradients[0], whole, weight, ctx.bias_shape, *ctx.options, ctx.needs_input_grad[:3]
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = halo.give_back(of_whole, x.shape, ctx.needed, ctx.grid)
        return of_x, of_weight, of_bias, None, None, None


class MaxPool3d(nn.MaxPool3d):
    """``torch.nn.MaxPool3d`` for :class:`.Sharded`, without ``ceil_mode`` and ``return_indices``;
    raises as :class:`Conv3d`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ceil_mode or self.return_indices:
            raise BadInput(
                'Pooling of divided volumes has no ceil_mode and no return_indices: leave them out.'
            )

    def forward(self, x: Sharded) -> Sharded:  # type: ignore[override]
        numbers = self.kernel_size, self.stride, self.padding, self.dilation
        layout, needed, padding = halo.plan_window(x.layout, x.grid, *numbers)
        whole = halo.fetch(x.local, needed, x.grid, fill=-math.inf)
        local = F.max_pool3d(whole, self.kernel_size, self.stride, padding, self.dilation)
        return replace(x, local=local, layout=layout)


class AvgPool3d(nn.AvgPool3d):
    """As torch's; no ``ceil_mode``, ``divisor_override``. Raises as :class:`Conv3d`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ceil_mode or not self.count_include_pad or self.divisor_override is not None:
            raise BadInput(
                'Pooling of divided volumes takes neither ceil_mode nor divisor_override, and '
                'padding counts: leave them out, and count_include_pad at True.'
            )

    def forward(self, x: Sharded) -> Sharded:  # type: ignore[override]
        numbers = self.kernel_size, self.stride, self.padding, 1
        layout, needed, padding = halo.plan_window(x.layout, x.grid, *numbers)
        whole = halo.fetch(x.local, needed, x.grid)
        local = F.avg_pool3d(whole, self.kernel_size, self.stride, padding)
        return replace(x, local=local, layout=layout)


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
