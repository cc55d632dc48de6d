"""Synthetic volumes of winding tubes of the same thickness that never touch, as blurred and noisy
images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from parsl_freetrain import BadInput

GAP = 3
"""Minimum number of voxels between two tubes."""
_TRIES = 2000


def tubes(
    extent: int, count: int, radius: float, seed: int, blur: float = 0.7, noise: float = 0.4
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """A cube that tubes cross, each from one face to the opposite one.

    Parameters
    ----------
    extent
        Voxels along each edge of the cube.
    count
        Number of tubes, at most 255.
    radius
        Of a tube, in voxels.
    seed
        The same seed gives the same cube.
    blur, noise
        Standard deviations of the Gaussian blur, in voxels, and of the noise that is added then; a
        tube is 1 and its surroundings are 0.

    Returns
    -------
    image, labels
        (extent, extent, extent) each. The image has mean 0 and standard deviation 1. A label is the
        tube's number from 1, or 0.

    Raises
    ------
    BadInput
        If this number of tubes cannot be placed.
    """
    random = np.random.default_rng(seed)
    labels, taken = np.zeros((extent,) * 3, np.uint8), np.zeros((extent,) * 3, bool)
    body, around = _ball(radius), _ball(2 * radius + GAP)
    number = 0
    for _ in range(_TRIES):
        if number == count:
            break
        path = _path(extent, random)
        if not taken[tuple(path.T)].any():
            number += 1
            labels[_swept(path, body, extent)] = number
            taken[_swept(path, around, extent)] = True
    if number < count:
        raise BadInput(
            f'A cube of {extent} voxels had room for {number} tubes of radius {radius:g} '
            f'and not for {count}: '
            f'ask for fewer or thinner tubes, or for a larger cube.'
        )
    seen = gaussian_filter(
        (labels > 0).astype(np.float64), blur, mode='nearest', radius=int(3 * blur)
    )
    image = seen + noise * random.standard_normal(labels.shape)
    return ((image - image.mean()) / image.std()).astype(np.float32), labels


def _path(extent: int, random: np.random.Generator) -> NDArray[np.intp]:
    """Voxels along the middle of a tube: (points, 3)."""
    along = np.linspace(0, 1, 3 * extent)
    across = []
    for _ in range(2):
        line = random.uniform(0.1, 0.9) + random.uniform(-0.25, 0.25) * (along - 0.5)
        for waves in (1, 2):
            line = line + random.uniform(-0.09, 0.09) / waves * np.sin(
                2 * np.pi * (waves * along + random.uniform())
            )
        across.append(line)
    path = np.array([along, *across])[random.permutation(3)].T
    return np.unique(np.rint(np.clip(path, 0, 1) * (extent - 1)).astype(np.intp), axis=0)


def _ball(radius: float) -> NDArray[np.intp]:
    reach = int(radius)
    steps = np.stack(
        np.meshgrid(*[np.arange(-reach, reach + 1)] * 3, indexing='ij'), axis=-1
    ).reshape(-1, 3)
    ball: NDArray[np.intp] = steps[(steps**2).sum(1) <= radius**2]
    return ball


def _swept(
    path: NDArray[np.intp], ball: NDArray[np.intp], extent: int
) -> tuple[NDArray[np.intp], ...]:
    """Indices of the voxels of the cube that a ball covers on its way."""
    voxels = (path[:, None] + ball).reshape(-1, 3)
    return tuple(voxels[((voxels >= 0) & (voxels < extent)).all(1)].T)
