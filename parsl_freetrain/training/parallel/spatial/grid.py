"""The ranks that share a sample, as a grid of depth x height x width, and their exchanges: of halos
along one axis after the other, so that corners come along, and of their gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.training.parallel.spatial import geometry as geo

Layout = tuple[geo.Bounds, geo.Bounds, geo.Bounds]  # along each of :data:`.geometry.AXES`


@dataclass(frozen=True)
class Axis:
    parts: int = 1  #: parts, index: number of ranks in the row, and number of this rank, from 0
    index: int = 0
    #: The ranks; None if there is only one, and in a rehearsal, which sends nothing.
    group: ProcessGroup | None = None

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over the row, the same to the last bit on all of its ranks."""
        if self.parts == 1 or self.group is None:
            return tensor
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, tensor: Tensor, sizes: tuple[int, ...], dim: int) -> list[Tensor]:
        """The tensors of all ranks, by index. They differ only in their ``sizes`` along ``dim``."""
        if self.parts == 1:
            return [tensor]
        if self.group is None:
            return [tensor.new_empty(_with(tensor, dim, size)) for size in sizes]
        # A backend that gathers tensors of different sizes also pads them to the largest.
        sent = tensor.new_zeros(_with(tensor, dim, max(sizes)))
        sent.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        rows = [torch.empty_like(sent) for _ in sizes]
        dist.all_gather(rows, sent, group=self.group)
        return [row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)]

    def swap(
        self, sent: tuple[Tensor, Tensor], wanted: tuple[int, int], dim: int
    ) -> tuple[Tensor, Tensor]:
        """Exchange ``wanted`` positions along ``dim`` with the ranks before and after."""
        got = tuple(sent[0].new_empty(_with(sent[0], dim, size)) for size in wanted)
        if self.group is not None:
            others = (self.index - 1, self.index + 1)
            operations = [
                dist.P2POp(way, tensor.contiguous(), group=self.group, group_peer=other)
                for way, tensors in ((dist.isend, sent), (dist.irecv, got))
                for tensor, other in zip(tensors, others, strict=True)
                if tensor.shape[dim]
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        return got[0], got[1]


@dataclass(frozen=True)
class Grid:
    """The ranks that share a sample, and this rank's position among them."""

    #: Along depth, height and width.
    axes: tuple[Axis, Axis, Axis] = field(default=(Axis(), Axis(), Axis()))
    data: Axis = field(default=Axis())  #: the ranks with the same part of other samples

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> 'Grid':
        """The grid of a mesh with dimensions ``data``, ``depth``, ``height``, ``width``; None: one
        rank.
        """
        if mesh is None:
            return cls()
        names = mesh.mesh_dim_names or ()

        def axis(name: str) -> Axis:
            size = mesh.size(names.index(name)) if name in names else 1
            if size < 2:
                return Axis()
            return Axis(size, mesh.get_local_rank(name), mesh.get_group(name))

        depth, height, width = map(axis, geo.AXES)
        return cls((depth, height, width), axis('data'))

    @classmethod
    def rehearsal(cls, spatial: tuple[int, int, int]) -> 'Grid':
        """A grid's first rank alone: nothing is sent, what is received has no defined content."""
        depth, height, width = map(Axis, spatial)
        return cls((depth, height, width))

    @property
    def parts(self) -> int:
        return math.prod(axis.parts for axis in self.axes)

    def layout(self, extents: tuple[int, int, int]) -> Layout:
        """A volume of these extents (voxels) in parts as equal as possible; or BadInput."""
        depth, height, width = (
            geo.split(n, axis.parts, name)
            for n, axis, name in zip(extents, self.axes, geo.AXES, strict=True)
        )
        return depth, height, width

    def own(self, layout: Layout) -> tuple[slice, slice, slice]:
        depth, height, width = (
            slice(bounds[axis.index], bounds[axis.index + 1])
            for bounds, axis in zip(layout, self.axes, strict=True)
        )
        return depth, height, width

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that share a sample, the same to the last bit on all of them."""
        for axis in self.axes:
            tensor = axis.add(tensor)
        return tensor


def _with(tensor: Tensor, dim: int, size: int) -> list[int]:
    return [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]]


Moves = tuple[geo.Move | None, geo.Move | None, geo.Move | None]
"""What is needed along each axis; None: it is not divided, so that the layer itself pads."""

FIRST = 2  # the dimension of depth: volumes are (samples, channels, depth, height, width)


def plan(
    reaches: Sequence[geo.Window], layout: Layout, grid: Grid, like: Layout | None = None
) -> tuple[Layout, Moves]:
    """The layout of a layer's output, and what this rank needs for its part. ``reaches``: how the
    layer acts on each axis; ``like``: the output's layout. BadInput as of
    :class:`.layers.Conv3d`.
    """
    out: list[geo.Bounds] = []
    needed: list[geo.Move | None] = []
    along = zip(reaches, layout, grid.axes, geo.AXES, strict=True)
    for i, (reach, bounds, axis, name) in enumerate(along):
        out.append(like[i] if like is not None else geo.placed(reach, bounds, name))
        needs = geo.moves(reach, bounds, out[i], name) if axis.parts > 1 else None
        needed.append(None if needs is None else needs[axis.index])
    return (out[0], out[1], out[2]), (needed[0], needed[1], needed[2])


def plan_window(layout: Layout, grid: Grid, *numbers: Any) -> tuple[Layout, Moves, list[int]]:
    """As :func:`plan`, by torch's arguments, and the padding that is left to torch."""
    triples = [(number,) * 3 if isinstance(number, int) else tuple(number) for number in numbers]
    windows = [geo.Window(*of_axis) for of_axis in zip(*triples, strict=True)]
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
        whole = gradient.new_zeros(_with(gradient, dim, shape[dim]))
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


def _steps(needed: Moves, grid: Grid) -> list[tuple[int, Axis, geo.Move]]:
    return [(FIRST + i, grid.axes[i], move) for i, move in enumerate(needed) if move is not None]


def _joined(
    x: Tensor, received: tuple[Tensor, Tensor], move: geo.Move, dim: int, fill: float
) -> Tensor:
    kept = x.narrow(dim, *_from(move.keep))
    if not any(move.pad) and not any(move.receive):
        return kept
    pads = [x.new_full(_with(x, dim, size), fill) for size in move.pad]
    return torch.cat([pads[0], received[0], kept, received[1], pads[1]], dim)


def _is_nothing(move: geo.Move, extent: int) -> bool:
    """Whether neither this rank nor its neighbours need anything that they do not have."""
    wanted = any(move.pad) or any(move.receive) or any(map(any, move.send))
    return move.keep == (0, extent) and not wanted


def _from(place: tuple[int, int]) -> tuple[int, int]:
    return place[0], place[1] - place[0]
