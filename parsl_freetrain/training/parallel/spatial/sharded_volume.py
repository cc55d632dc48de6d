"""Volumes divided among ranks, and undivided tensors from them: sums, parameters, whole volumes."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, permutations, product
from operator import add, ge, gt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.spatial.grid import FIRST, Grid, Layout


@dataclass(frozen=True, eq=False)
class Sharded:
    """A batch of volumes, of which this rank has one part."""

    local: Tensor  #: this rank's part: (samples, channels, depth, height, width)
    layout: Layout  #: the bounds of all parts
    grid: Grid  #: the ranks that have them

    @classmethod
    def of(cls, local: Tensor, extents: tuple[int, int, int], grid: Grid) -> 'Sharded':
        """This rank's part of volumes of ``extents`` (voxels of depth, height, width); BadInput for
        more parts than positions, or another part.
        """
        layout = grid.layout(extents)
        expected = tuple(place.stop - place.start for place in grid.own(layout))
        if tuple(local.shape[FIRST:]) != expected:
            raise BadInput(
                f'This rank was given a part of {_said(local.shape[FIRST:])} voxels; of '
                f'{_said(extents)} in '
                f'{_said(axis.parts for axis in grid.axes)} parts its own has {_said(expected)}.'
            )
        return cls(local, layout, grid)

    def apply(self, function: Callable[[Tensor], Tensor]) -> 'Sharded':
        """Apply a function that treats each voxel by itself, such as an activation or a cast."""
        return replace(self, local=function(self.local))

    def whole(self) -> Tensor:
        """The whole volumes, on all ranks alike: the gradient of what follows counts once."""
        if self.grid.parts == 1:
            return self.local
        return _Whole.apply(self.local, self.layout, self.grid)  # type: ignore[no-any-return, no-untyped-call]


def concatenate(volumes: Sequence[Sharded]) -> Sharded:
    """Concatenate the channels of volumes with the same layout."""
    if any(volume.layout != volumes[0].layout for volume in volumes):
        raise BadInput(
            'Volumes can only be concatenated where their parts are the same: give a transposed '
            'convolution like=, the volume that its output is to be put together with.'
        )
    return replace(volumes[0], local=torch.cat([volume.local for volume in volumes], 1))


def total(value: Tensor, grid: Grid) -> Tensor:
    """The sum over the ranks that share a sample, for instance of each one's part of a loss."""
    return value if grid.parts == 1 else _Total.apply(value, grid)  # type: ignore[no-untyped-call]


def shared(grid: Grid, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """Parameters for use on parts: their gradients are summed over the ranks in one exchange."""
    present = [parameter for parameter in parameters if parameter is not None]
    if grid.parts == 1 or not present:
        return parameters
    uses = iter(_Shared.apply(grid, *present))  # type: ignore[no-untyped-call]
    return tuple(next(uses) if parameter is not None else None for parameter in parameters)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, layout: Layout, grid: Grid) -> Tensor:
        ctx.own = grid.own(layout)
        for i, (axis, bounds) in enumerate(zip(grid.axes, layout, strict=True)):
            sizes = tuple(end - begin for begin, end in pairwise(bounds))
            if axis.parts > 1:
                local = torch.cat(axis.gather(local, sizes, FIRST + i), FIRST + i)
        return local

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][(slice(None), slice(None), *ctx.own)].contiguous(), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, grid: Grid) -> Tensor:
        return grid.add(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # All ranks have the sum and the same loss; each takes the gradient of its own part only.
        return gradients[0], None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.grid = grid
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums = ctx.grid.add(torch.cat([gradient.reshape(-1) for gradient in gradients]))
        parts = sums.split([gradient.numel() for gradient in gradients])
        pairs = zip(parts, gradients, strict=True)
        return None, *(part.view_as(gradient) for part, gradient in pairs)


def _said(numbers: Iterable[int]) -> str:
    return 'x'.join(map(str, numbers))


Corner = tuple[int, int, int, int]


class ShardedVolumes(Dataset[Tensor]):
    """This rank's parts of volumes in a file. The file is mapped into memory, so only these parts
    are read. Raises BadInput if the file cannot be read or holds something else, there are more
    parts than positions, or a crop extends beyond the array.

    Parameters
    ----------
    path
        A .npy file with an array (samples, channels, depth, height, width), in C order.
    grid
        The ranks that have the parts.
    extents
        Extents of the volumes to train on, in voxels of depth, height and width. Default: a whole
        sample.
    corners
        Where each volume begins: (sample, depth, height, width). Default: one per sample, at 0.
        Together with ``extents`` these are crops.
    """

    def __init__(
        self,
        path: str | Path,
        grid: Grid,
        extents: tuple[int, int, int] | None = None,
        corners: Sequence[Corner] | None = None,
    ) -> None:
        try:
            self._array: NDArray[Any] = np.lib.format.open_memmap(path, mode='r')
        except (OSError, ValueError) as error:
            raise BadInput(
                f'{path} cannot be read as an array ({error}): give a .npy file made by numpy.save.'
            ) from error
        shape = self._array.shape
        if len(shape) != 5:
            raise BadInput(
                f'{path} has an array of shape {shape}; it must have 5 dimensions: '
                'samples, channels, depth, height, width.'
            )
        self.extents = extents or (shape[2], shape[3], shape[4])
        self._corners: Sequence[Corner] = (
            corners if corners is not None else [(sample, 0, 0, 0) for sample in range(shape[0])]
        )
        for corner in self._corners:
            ends = corner[0] + 1, *map(add, corner[1:], self.extents)
            if min(corner) < 0 or any(map(gt, ends, (shape[0], *shape[2:]))):
                raise BadInput(
                    f'{path}: a volume of {"x".join(map(str, self.extents))} voxels from '
                    f'{corner[1:]} of sample {corner[0]} on goes beyond the array of shape {shape}.'
                )
        self._own = grid.own(grid.layout(self.extents))

    def __len__(self) -> int:
        return len(self._corners)

    def __getitem__(self, index: int) -> Tensor:
        """This rank's part of a volume: (channels, depth, height, width)."""
        sample, *corner = self._corners[index]
        each = zip(corner, self._own, strict=True)
        along = (slice(at + own.start, at + own.stop) for at, own in each)
        place: tuple[int | slice, ...] = (sample, slice(None), *along)
        return torch.from_numpy(np.array(self._array[place]))


Extents = tuple[int, int, int]


def check_division(network: nn.Module, channels: int, extents: Extents, spatial: Extents) -> None:
    """Refuse (BadInput, with the divisions that are possible) what a layer cannot divide: a part of
    its output would be empty, or need more than its neighbours have. ``channels, extents``: of its
    input in voxels; ``spatial``: parts of depth, height and width.
    """
    made = copy.deepcopy(network).to('meta').eval()
    try:
        _rehearse(made, channels, extents, spatial)
    except BadInput as error:
        depth, height, width = (range(1, parts + 1) for parts in spatial)
        goes = partial(_rehearse, made, channels, extents)
        could = [wish for wish in product(depth, height, width) if _goes(partial(goes, wish))]
        coarser = [one for one, wish in permutations(could, 2) if all(map(ge, wish, one))]
        coarsest = [wish for wish in could if wish not in coarser]
        best = ', '.join('x'.join(map(str, wish)) for wish in coarsest)
        raise BadInput(
            f'Volumes of {"x".join(map(str, extents))} cannot be divided into '
            f'{"x".join(map(str, spatial))} parts for this network, which can have '
            f'{f"at the finest {best}" if could else "no division of them"}: {error}'
        ) from error


@torch.no_grad()
def _rehearse(network: nn.Module, channels: int, extents: Extents, spatial: Extents) -> None:
    grid = Grid.rehearsal(spatial)
    own = [place.stop - place.start for place in grid.own(grid.layout(extents))]
    network(Sharded.of(torch.empty(1, channels, *own, device='meta'), extents, grid))


def _goes(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except BadInput:
        return False
    return True
