"""Flood filling: a trained network follows the objects of a volume, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.ndimage import label
from torch import Tensor

from workflows.ffn_network import BLANK, MOVE, START, View, logit

Position = tuple[int, int, int]

FOUND = logit(0.6)
"""Logit from which a voxel belongs to the object."""
SMALLEST = 100
"""Minimum number of voxels of an object."""


class Places:
    """The positions that the field of view still has to visit, in order, each only once.

    Two positions count as the same if they lie in the same cell of a grid with spacing
    ``view.delta``. The outermost positions, the only ones that see the volume's border, have their
    own cells.
    """

    def __init__(self, shape: Sequence[int], view: View) -> None:
        self._view, self._within = view, view.within(shape)
        self._queue: deque[Position] = deque()
        self._known: set[tuple[tuple[bool, int], ...]] = set()

    def add(self, position: Sequence[int]) -> None:
        """Add a position, moved so that the field of view is inside the volume, unless it was added
        before.
        """
        z, y, x = (
            min(max(at, first), last)
            for at, (first, last) in zip(position, self._within, strict=True)
        )
        cell = tuple(
            (at in ends, at if at in ends else at // self._view.delta)
            for at, ends in zip((z, y, x), self._within, strict=True)
        )
        if cell not in self._known:
            self._known.add(cell)
            self._queue.append((z, y, x))

    def add_around(self, position: Position, logits: Tensor) -> None:
        """For each face at distance ``view.delta`` whose largest logit exceeds :data:`MOVE`, add
        the place of this logit.
        """
        delta, half = self._view.delta, self._view.half
        core = logits[(slice(half - delta, half + delta + 1),) * 3]
        for axis in range(3):
            for side in (0, 2 * delta):
                face = core.select(axis, side)
                if face.max() >= MOVE:
                    step = list(divmod(int(face.argmax()), 2 * delta + 1))
                    step.insert(axis, side)
                    self.add([at + moved - delta for at, moved in zip(position, step, strict=True)])

    def __iter__(self) -> Iterator[Position]:
        while self._queue:
            yield self._queue.popleft()


@torch.no_grad()
def flood(
    network: Callable[[Tensor, Tensor], Tensor], image: Tensor, start: Position, view: View
) -> Tensor:
    """Follow one object through a volume.

    Parameters
    ----------
    network
        Takes fields of view of image and seed, (1, 1, extent, extent, extent); returns the change
        of the seed.
    image
        (depth, height, width).
    start
        A voxel of the object.

    Returns
    -------
    Tensor
        In the volume's shape, the logits of belonging to the object.
    """
    seed = torch.full_like(image, BLANK)
    seed[start] = START
    places = Places(image.shape, view)
    places.add(start)
    for position in places:
        logits = view.cut(seed, position)
        logits += network(view.cut(image, position)[None, None], logits[None, None])[0, 0]
        places.add_around(position, logits)
    return seed


def segmented(
    network: Callable[[Tensor, Tensor], Tensor], image: Tensor, view: View
) -> NDArray[np.int32]:
    """Number all objects of a volume: (depth, height, width), 0 where there is none.

    Objects are followed from :func:`starts`, one after the other; voxels of one are not given to a
    later one.
    """
    found = np.zeros(tuple(image.shape), np.int32)
    number = 0
    for start in starts(image, view):
        if found[start]:
            continue
        new = (flood(network, image, start, view) >= FOUND).numpy() & (found == 0)
        if new[start] and new.sum() >= SMALLEST:
            number += 1
            found[new] = number
    return found


def starts(image: Tensor, view: View) -> list[Position]:
    """Starting points: the peaks of the blurred image in its brighter half, brightest first. The
    truth is not used.
    """
    values = _blurred(image)
    peaks = (
        F.max_pool3d(values[None, None], 2 * view.delta + 1, stride=1, padding=view.delta)[0, 0]
        == values
    )
    positions = (peaks & (values > (values.min() + values.max()) / 2)).nonzero().tolist()
    return [(z, y, x) for z, y, x in sorted(positions, key=lambda at: -float(values[tuple(at)]))]


def overlaps(found: NDArray[np.integer], truth: NDArray[np.integer]) -> list[float]:
    """For each object of the truth, in the order of its numbers: intersection over union with the
    found object that fits it best.
    """
    columns = int(found.max()) + 1
    both = np.bincount(
        truth.astype(np.int64).ravel() * columns + found.ravel(),
        minlength=(int(truth.max()) + 1) * columns,
    )
    counts = both.reshape(-1, columns)
    union = counts.sum(1, keepdims=True) + counts.sum(0) - counts
    return [
        float((counts[i, 1:] / union[i, 1:]).max(initial=0.0))
        for i in range(1, len(counts))
        if counts[i].any()
    ]


def segmented_by_brightness(image: Tensor, truth: NDArray[np.integer]) -> NDArray[np.int32]:
    """The baseline without a network: connected voxels above a threshold in the image, blurred as
    for :func:`starts`.

    The best of nine thresholds is chosen by the truth, so the baseline is better than is possible
    in practice.
    """
    values = _blurred(image)
    levels = torch.quantile(values.flatten()[::7], torch.linspace(0.7, 0.95, 9))
    return max(
        (connected((values > level).numpy()) for level in levels),
        key=lambda found: float(np.mean(overlaps(found, truth))),
    )


def _blurred(image: Tensor) -> Tensor:
    blurred = image[None, None]
    for _ in range(2):
        blurred = F.avg_pool3d(blurred, 3, stride=1, padding=1, count_include_pad=False)
    return blurred[0, 0]


def connected(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Number the connected regions; voxels that touch at corners are connected."""
    numbers: NDArray[np.int32] = label(mask, np.ones((3, 3, 3)))[0]
    return numbers
