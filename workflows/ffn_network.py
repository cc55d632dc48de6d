"""A flood-filling network, which follows an object from one field of view to the next, and its
training loss.

The network is that of Januszewski et al. 2018 (Nature Methods 15, 605), described there and in Dong
et al. 2019 (arXiv 1905.06236). Its result for an object so far is part of its input: a map of
logits, the *seed*, which it updates.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from parsl_freetrain import BadInput

INSIDE, OUTSIDE = 0.95, 0.05
"""Target probabilities of voxels inside and outside the object: softened, so that logits stay
small.
"""


def logit(probability: float) -> float:
    """The inverse of the sigmoid."""
    return math.log(probability / (1 - probability))


START, BLANK, MOVE = logit(INSIDE), logit(OUTSIDE), logit(0.9)
"""Logits of the starting voxel, of all other voxels at first, and of a voxel to move to."""


@dataclass(frozen=True)
class View:
    """The network's field of view and its moves.

    Attributes
    ----------
    extent
        Voxels along each edge of the field of view; odd, so that there is a middle voxel.
    delta
        Voxels of a move along an axis.
    moves
        Number of moves tried with each training example, at most 26 (to all corners, edges and
        faces).

    Raises
    ------
    BadInput
        If one of these is invalid.
    """

    extent: int = 17
    delta: int = 4
    moves: int = 8

    def __post_init__(self) -> None:
        if self.extent < 3 or self.extent % 2 == 0:
            right = f'{max(self.extent - 1, 3)} or {max(self.extent + 1, 5)}'
            raise BadInput(
                f'The field of view is {self.extent} voxels wide; it needs a middle, so '
                f'an odd width such as {right}.'
            )
        if not 1 <= self.delta <= self.half:
            raise BadInput(
                f'A move of {self.delta} voxels leads outside of what was seen: in a '
                f'field of view of {self.extent} voxels '
                f'it is 1 to {self.half} voxels.'
            )
        if not 0 <= self.moves <= 26:
            raise BadInput(
                f'{self.moves} moves per example; there are 26 directions, so it must be 0 to 26.'
            )

    @property
    def half(self) -> int:
        """Voxels on either side of the middle."""
        return self.extent // 2

    @property
    def around(self) -> int:
        """Voxels along each edge of an example, which covers all fields of view after one move."""
        return self.extent + 2 * self.delta

    def within(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """First and last position along each axis at which the field of view lies inside a volume
        of this shape.

        Raises
        ------
        BadInput
            If the volume is smaller than the field of view.
        """
        if min(shape) < self.extent:
            raise BadInput(
                f'The volume has {"x".join(map(str, shape))} voxels; a field of view of '
                f'{self.extent} does not fit into it.'
            )
        return tuple((self.half, size - 1 - self.half) for size in shape)

    def cut(self, volume: Tensor, at: Sequence[int]) -> Tensor:
        """The field of view around a position, a view of the volume's last three dimensions."""
        z, y, x = (slice(middle - self.half, middle + self.half + 1) for middle in at)
        return volume[..., z, y, x]


class FFN(nn.Module):
    """Residual convolutions over image and seed; returns the change of the seed.

    Parameters
    ----------
    channels
        Of all layers between the first and the last.
    depth
        Pairs of convolutions.
    """

    def __init__(self, channels: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv3d(2, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(channels, channels, 3, padding=1),
        )
        self.residuals = nn.ModuleList(
            nn.Sequential(
                nn.ReLU(),
                nn.Conv3d(channels, channels, 3, padding=1),
                nn.ReLU(),
                nn.Conv3d(channels, channels, 3, padding=1),
            )
            for _ in range(depth - 1)
        )
        self.last = nn.Sequential(nn.ReLU(), nn.Conv3d(channels, 1, 1))

    def forward(self, image: Tensor, seed: Tensor) -> Tensor:
        """All tensors: (fields of view, 1, extent, extent, extent)."""
        # With channels last, oneDNN needs no reordering around each convolution.
        x = self.first(torch.cat([image, seed], 1).contiguous(memory_format=torch.channels_last_3d))
        for residual in self.residuals:
            x = x + residual(x)
        return self.last(x)  # type: ignore[no-any-return]


class Examples(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Surroundings of voxels in objects, randomly rotated and mirrored, each with the moves to try.

    Parameters
    ----------
    images, labels
        (volumes, depth, height, width).
    centres
        Volume index and position of each example's middle.

    Raises
    ------
    BadInput
        If a volume has no room for an example.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        centres: Sequence[tuple[int, int, int, int]],
        view: View,
    ) -> None:
        if min(images.shape[1:]) < view.around:
            raise BadInput(
                f'A volume to train on has {"x".join(map(str, images.shape[1:]))} '
                f'voxels; an example takes {view.around} along '
                f'each axis, for a field of view of {view.extent} and moves of '
                f'{view.delta} to both sides.'
            )
        self._images, self._labels, self._centres, self._view = images, labels, centres, view
        self._offsets = torch.tensor(
            [
                step
                for step in itertools.product((-view.delta, 0, view.delta), repeat=3)
                if any(step)
            ]
        )

    def __len__(self) -> int:
        return len(self._centres)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Image and soft target, both (1, around, around, around), and offsets from the middle
        (moves, 3).
        """
        volume, *middle = self._centres[index]
        reach = self._view.around // 2
        z, y, x = (slice(at - reach, at + reach + 1) for at in middle)
        image, label = self._images[volume, z, y, x], self._labels[volume, z, y, x]
        target = torch.where(label == label[reach, reach, reach], INSIDE, OUTSIDE)
        axes = [1 + int(axis) for axis in torch.randperm(3)]
        mirrored = [1 + axis for axis in range(3) if torch.rand(()) < 0.5]
        image, target = (part[None].permute(0, *axes).flip(mirrored) for part in (image, target))
        return image, target, self._offsets[torch.randperm(len(self._offsets))[: self._view.moves]]


def centres_in(
    labels: Tensor, count: int, view: View, seed: int
) -> list[tuple[int, int, int, int]]:
    """Voxels of objects, chosen at random, around which there is room for an example.

    Every other voxel has a second object in its field of view, if there are such voxels: few voxels
    lie between near objects, but most of the learning is there.

    Raises
    ------
    BadInput
        If there is none.
    """
    reach = view.around // 2
    room = torch.zeros_like(labels, dtype=torch.bool)
    room[:, *(slice(reach, size - reach) for size in labels.shape[1:])] = True
    numbers = labels[:, None].float()
    highest, lowest = (
        sign
        * F.max_pool3d(
            sign * torch.where(numbers > 0, numbers, sign * -1000), view.extent, 1, view.half
        )[:, 0]
        for sign in (1, -1)
    )
    objects = (labels > 0) & room
    found = objects.nonzero()
    if not len(found):
        raise BadInput(
            f'No voxel of an object lies {reach} voxels or more inside of the '
            f'{len(labels)} volumes: make them larger.'
        )
    crowded = (objects & (highest > lowest)).nonzero()
    random = torch.Generator().manual_seed(seed)
    chosen = [
        among[int(torch.randint(len(among), (), generator=random))].tolist()
        for among in itertools.islice(
            itertools.cycle((found, crowded if len(crowded) else found)), count
        )
    ]
    return [(volume, z, y, x) for volume, z, y, x in chosen]


def follow(
    network: Callable[[Tensor, Tensor], Tensor],
    image: Tensor,
    target: Tensor,
    offsets: Tensor,
    view: View,
) -> tuple[Tensor, int]:
    """The loss of examples whose objects are followed from the middle.

    First the field of view is in the middle. Then it moves to each of the example's offsets, in
    order, if the seed exceeds :data:`MOVE` there by then. Later places see the changes that the
    network made to the seed at earlier ones.

    Parameters
    ----------
    network
        Takes fields of view of image and seed; returns the change of the seed.
    image, target, offsets
        Batches from :class:`Examples`.

    Returns
    -------
    loss
        The cross entropy per voxel of the seed in the field of view: mean over the places of an
        example, then over examples.
    places
        Number of places that the network visited, over all examples.
    """
    seed = torch.full_like(image, BLANK)
    middle = view.around // 2
    seed[:, :, middle, middle, middle] = START
    steps = torch.cat([torch.zeros_like(offsets[:, :1]), offsets], 1) + middle
    losses, places = image.new_zeros(len(image)), image.new_zeros(len(image))
    for step in steps.unbind(1):
        at = [
            (i, tuple(position))
            for i, position in enumerate(step.tolist())
            if seed[(i, 0, *position)] >= MOVE
        ]
        if not at:
            continue
        seen, before, wanted = (
            torch.stack([view.cut(volume[i], position) for i, position in at])
            for volume in (image, seed, target)
        )
        now = before + network(seen, before)
        here = torch.tensor([i for i, _ in at], device=image.device)
        losses = losses.index_add(
            0,
            here,
            F.binary_cross_entropy_with_logits(now, wanted, reduction='none').mean((1, 2, 3, 4)),
        )
        places[here] += 1
        for (i, position), logits in zip(at, now.detach(), strict=True):
            view.cut(seed[i], position).copy_(logits)
    return (losses / places).mean(), int(places.sum())
