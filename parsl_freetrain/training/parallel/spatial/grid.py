"""The ranks that share a sample, as a grid of depth x height x width, and their exchanges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.training.parallel.spatial.geometry import AXES, Bounds, split

Layout = tuple[Bounds, Bounds, Bounds]  # bounds of parts along each of :data:`.geometry.AXES`


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
    def of(cls, mesh: DeviceMesh | None) -> Grid:
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

        depth, height, width = map(axis, AXES)
        return cls((depth, height, width), axis('data'))

    @classmethod
    def rehearsal(cls, spatial: tuple[int, int, int]) -> Grid:
        """A grid's first rank alone: nothing is sent, what is received has no defined content."""
        depth, height, width = map(Axis, spatial)
        return cls((depth, height, width))

    @property
    def parts(self) -> int:
        return math.prod(axis.parts for axis in self.axes)

    def layout(self, extents: tuple[int, int, int]) -> Layout:
        """A volume of these extents (voxels) in parts as equal as possible; or BadInput."""
        depth, height, width = (
            split(n, axis.parts, name)
            for n, axis, name in zip(extents, self.axes, AXES, strict=True)
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
