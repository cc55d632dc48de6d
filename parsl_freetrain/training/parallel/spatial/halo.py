"""Halo exchange along one axis after the other, so that corners come along; and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parsl_freetrain.training.parallel.spatial import geometry
from parsl_freetrain.training.parallel.spatial.grid import Axis, Grid, Layout

Moves = tuple[geometry.Move | None, geometry.Move | None, geometry.Move | None]
"""What is needed along each axis; None: it is not divided, so that the layer itself pads."""

FIRST = 2  # the dimension of depth: volumes are (samples, channels, depth, height, width)


def plan(
    reaches: Sequence[geometry.Window], layout: Layout, grid: Grid, like: Layout | None = None
) -> tuple[Layout, Moves]:
    """The layout of a layer's output, and what this rank needs for its part. ``reaches``: how the
    layer acts on each axis; ``like``: the output's layout. BadInput as of
    :class:`.layers.Conv3d`.
    """
    out: list[geometry.Bounds] = []
    needed: list[geometry.Move | None] = []
    along = zip(reaches, layout, grid.axes, geometry.AXES, strict=True)
    for i, (reach, bounds, axis, name) in enumerate(along):
        out.append(like[i] if like is not None else geometry.placed(reach, bounds, name))
        moves = geometry.moves(reach, bounds, out[i], name) if axis.parts > 1 else None
        needed.append(None if moves is None else moves[axis.index])
    return (out[0], out[1], out[2]), (needed[0], needed[1], needed[2])


def plan_window(layout: Layout, grid: Grid, *numbers: Any) -> tuple[Layout, Moves, list[int]]:
    """As :func:`plan`, by torch's arguments, and the padding that is left to torch."""
    triples = [(number,) * 3 if isinstance(number, int) else tuple(number) for number in numbers]
    windows = [geometry.Window(*of_axis) for of_axis in zip(*triples, strict=True)]
    out, needed = plan(windows, layout, grid)
    pairs = zip(needed, windows, strict=True)
    return out, needed, [0 if move is not None else window.padding for move, window in pairs]


def collect(
    x: Tensor, needed: Moves, grid: Grid, fill: float = 0.0, got: Sequence[Tensor] = ()
) -> tuple[Tensor, list[Tensor]]:
    """What a rank needs, and what it received for that: two tensors for each divided axis. With
    what it has ``got`` before, once more without an exchange.
    """
    every: list[Tensor] = []
    for dim, axis, move in _steps(needed, grid):
        sent = x.narrow(dim, *_from(move.send[0])), x.narrow(dim, *_from(move.send[1]))
        before = got[len(every) : len(every) + 2]
        received = (before[0], before[1]) if before else axis.swap(sent, move.receive, dim)
        every += received
        x = _joined(x, received, move, dim, fill)
    return x, every


def give_back(gradient: Tensor, shape: torch.Size, needed: Moves, grid: Grid) -> Tensor:
    """The gradient of a part of ``shape`` from that of :func:`collect`'s result."""
    for dim, axis, move in reversed(_steps(needed, grid)):
        before, after = move.receive
        begin = move.pad[0] + before
        kept = move.keep[1] - move.keep[0]
        sent = gradient.narrow(dim, move.pad[0], before), gradient.narrow(dim, begin + kept, after)
        lengths = move.send[0][1] - move.send[0][0], move.send[1][1] - move.send[1][0]
        returned = axis.swap(sent, lengths, dim)
        whole = gradient.new_zeros([*gradient.shape[:dim], shape[dim], *gradient.shape[dim + 1 :]])
        whole.narrow(dim, *_from(move.keep)).copy_(gradient.narrow(dim, begin, kept))
        for part, place in zip(returned, move.send, strict=True):
            if part.shape[dim]:
                whole.narrow(dim, *_from(place)).add_(part)
        gradient = whole
    return gradient


def fetch(x: Tensor, needed: Moves, grid: Grid, fill: float = 0.0) -> Tensor:
    """:func:`collect` for autograd. ``fill`` is the value beyond the borders of the volume."""
    if all(move is None or _is_nothing(move, x.shape[FIRST + i]) for i, move in enumerate(needed)):
        return x
    return _Fetch.apply(x, needed, grid, fill)  # type: ignore[no-any-return, no-untyped-call]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, needed: Moves, grid: Grid, fill: float) -> Tensor:
        ctx.shape, ctx.needed, ctx.grid = x.shape, needed, grid
        whole, _ = collect(x, needed, grid, fill)
        return whole.view_as(whole) if whole is x else whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return give_back(gradients[0], ctx.shape, ctx.needed, ctx.grid), None, None, None


def _steps(needed: Moves, grid: Grid) -> list[tuple[int, Axis, geometry.Move]]:
    return [(FIRST + i, grid.axes[i], move) for i, move in enumerate(needed) if move is not None]


def _joined(
    x: Tensor, received: tuple[Tensor, Tensor], move: geometry.Move, dim: int, fill: float
) -> Tensor:
    kept = x.narrow(dim, *_from(move.keep))
    if not any(move.pad) and not any(move.receive):
        return kept
    pads = [x.new_full([*x.shape[:dim], size, *x.shape[dim + 1 :]], fill) for size in move.pad]
    return torch.cat([pads[0], received[0], kept, received[1], pads[1]], dim)


def _is_nothing(move: geometry.Move, extent: int) -> bool:
    """Whether neither this rank nor its neighbours need anything that they do not have."""
    wanted = any(move.pad) or any(move.receive) or any(map(any, move.send))
    return move.keep == (0, extent) and not wanted


def _from(place: tuple[int, int]) -> tuple[int, int]:
    return place[0], place[1] - place[0]
