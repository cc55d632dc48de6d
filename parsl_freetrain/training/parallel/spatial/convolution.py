"""Convolutions and pooling of divided volumes, with the arguments, names and values of torch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.spatial import halo
from parsl_freetrain.training.parallel.spatial.geometry import TransposedWindow
from parsl_freetrain.training.parallel.spatial.grid import Grid
from parsl_freetrain.training.parallel.spatial.halo import fetch, plan_window
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
        whole = halo.assembled(x, got, ctx.needed, ctx.grid)
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
        layout, needed, padding = plan_window(x.layout, x.grid, *numbers)
        whole = fetch(x.local, needed, x.grid, fill=-math.inf)
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
        layout, needed, padding = plan_window(x.layout, x.grid, *numbers)
        local = F.avg_pool3d(fetch(x.local, needed, x.grid), self.kernel_size, self.stride, padding)
        return replace(x, local=local, layout=layout)
