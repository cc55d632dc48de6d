"""The network of :mod:`workflows.unet3d` and its training function. Ranks import this module, so it
imports little.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import StackDataset

from parsl_freetrain.training.parallel.spatial import (
    BatchNorm3d,
    Conv3d,
    ConvTranspose3d,
    Grid,
    MaxPool3d,
    Sharded,
    ShardedVolumes,
    concatenate,
    total,
)

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext

TISSUES = ('other', 'grey', 'white')


class _Block(nn.Module):
    """Convolution, normalisation with statistics over all nodes, activation."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.convolution, self.norm = (
            Conv3d(channels, made, 3, padding=1, bias=False),
            BatchNorm3d(made, over_data=True),
        )

    def forward(self, x: Sharded) -> Sharded:
        return self.norm(self.convolution(x)).apply(F.relu)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Two levels down and up again, for any extents."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList([_Block(1, width), _Block(width, 2 * width)])
        self.pool = MaxPool3d(2)
        self.bottom = _Block(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [
                ConvTranspose3d(4 * width, 2 * width, 2, stride=2),
                ConvTranspose3d(2 * width, width, 2, stride=2),
            ]
        )
        self.merge = nn.ModuleList([_Block(4 * width, 2 * width), _Block(2 * width, width)])
        self.last = Conv3d(width, len(TISSUES), 1)

    def forward(self, x: Sharded) -> Sharded:
        skipped = []
        for block in self.down:
            skipped.append(block(x))
            x = self.pool(skipped[-1])
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            beside = skipped.pop()
            x = merge(concatenate([beside, up(x, like=beside)]))
        return self.last(x)  # type: ignore[no-any-return]


def train_unet(
    ctx: FragmentContext,
    folder: str,
    crop: int,
    corners: list[tuple[int, int, int, int]],
    front: int,
) -> None:
    """Each rank reads its part of each crop and trains; at the end it segments its part of the
    front of the head.
    """
    grid, extents = Grid.of(ctx.mesh), (crop,) * 3
    torch.manual_seed(1)
    model = UNet()
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    files = [Path(folder, f'{name}.npy') for name in ('template', 'labels')]
    curve = ctx.state.setdefault('losses', [])
    ctx.each_epoch(lambda: curve.append((ctx.samples, ctx.metrics['loss'])))
    for image, label in ctx.loop(
        StackDataset(*(ShardedVolumes(file, grid, extents, corners) for file in files)),
        batch_size=4,
    ):
        optimizer.zero_grad()
        made = model(Sharded.of(image, extents, grid)).local
        mine = F.cross_entropy(made, label[:, 0].long(), reduction='sum')
        loss = total(mine / (len(image) * math.prod(extents)), grid)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
    shape = np.load(files[0], mmap_mode='r', allow_pickle=False).shape
    rest = (shape[2], shape[3] - front, shape[4])
    image, label = (ShardedVolumes(file, grid, rest, [(0, 0, front, 0)])[0] for file in files)
    model.eval()
    with torch.no_grad():
        found = model(Sharded.of(image[None], rest, grid)).local.argmax(1)
    ctx.report(**dice(found[0], label[0], grid))
    if ctx.is_main:
        Path(folder, f'{ctx.trainer}-losses.json').write_text(json.dumps(curve))


def dice(found: Tensor, truth: Tensor, grid: Grid) -> dict[str, float]:
    """The Dice score of each tissue over all parts: twice the intersection over the sum of both
    sizes.
    """
    counts = torch.stack(
        [
            torch.stack(
                [((found == i) & (truth == i)).sum(), (found == i).sum() + (truth == i).sum()]
            )
            for i in range(1, len(TISSUES))
        ]
    )
    return {
        f'dice_{name}': 2 * int(both) / int(either)
        for name, (both, either) in zip(TISSUES[1:], grid.add(counts), strict=True)
    }
