"""Which part of a tensor this rank holds: a box of a DTensor, all of any other tensor."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    shape: tuple[int, ...]  #: shape of the whole tensor
    #: offsets, sizes: where the part begins, and how large it is, in each dimension.
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls(shape, (0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What is in both parts of one tensor; None: nothing."""
        begins = tuple(map(max, self.offsets, other.offsets))
        each = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ends = tuple(min(a + n, b + m) for a, n, b, m in each)
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            return None
        return Box(self.shape, begins, tuple(e - b for b, e in zip(begins, ends, strict=True)))

    def inside(self, tensor: torch.Tensor, part: Box) -> torch.Tensor:
        """The view of ``part`` in a tensor that holds this box."""
        every = zip(self.offsets, part.offsets, part.sizes, strict=True)
        for dimension, (mine, begin, size) in enumerate(every):
            tensor = tensor.narrow(dimension, begin - mine, size)
        return tensor


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs of real ones, which sums and norms of both are about."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_divided(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether ranks may hold different parts of a tensor."""
    # Its import takes half as long as torch's own; where there was none, there is no DTensor.
    module = sys.modules.get('torch.distributed.tensor')
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    if not is_divided(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def box_of(tensor: torch.Tensor) -> Box:
    if not is_divided(tensor):
        return Box.whole(tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return Box(tuple(tensor.shape), tuple(offsets), tuple(sizes))


def divided_like(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that is divided among ranks as another one is, from this rank's part of it."""
    if not is_divided(tensor):
        return part
    from torch.distributed.tensor import DTensor

    whole: Any = {'run_check': False, 'shape': tensor.shape, 'stride': tensor.stride()}
    return DTensor.from_local(part, tensor.device_mesh, tensor.placements, **whole)


def divided_along(tensor: torch.Tensor) -> frozenset[str]:
    """The dimensions of the mesh along which ranks hold different parts of a tensor."""
    if not is_divided(tensor):
        return frozenset()
    placed = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
    return frozenset(name for name, placement in placed if not placement.is_replicate())


def holders(tensor: torch.Tensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks of ``mesh`` that hold the same part as this one, in order."""
    divided = divided_along(tensor)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert mesh.mesh_dim_names is not None
    named = zip(mesh.mesh_dim_names, coordinate, strict=True)
    index: tuple[Any, ...] = tuple(at if name in divided else slice(None) for name, at in named)
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))
