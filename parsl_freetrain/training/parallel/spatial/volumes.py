"""Reading volumes in parts: each rank reads only its own."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, gt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.parallel.spatial.grid import Grid

Corner = tuple[int, int, int, int]


class ShardedVolumes(Dataset[Tensor]):
    """This rank's parts of volumes in a file. The file is mapped into memory, so only these parts
    are read.

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

    Raises
    ------
    BadInput
        If the file cannot be read or holds something else, there are more parts than positions, or
        a crop extends beyond the array.
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
