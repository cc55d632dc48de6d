"""The network of :mod:`workflows.cosmoflow` and its training function. Ranks import this module, so
it imports little.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import StackDataset, TensorDataset

from parsl_freetrain.training.parallel.spatial import (
    Conv3d,
    Grid,
    MaxPool3d,
    Sharded,
    ShardedVolumes,
)

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext


class CosmoFlow(nn.Module):
    """Convolutions and pools down to 4 voxels in each direction, then dense layers on the whole."""

    def __init__(self, extent: int, width: int = 8) -> None:
        super().__init__()
        levels = extent.bit_length() - 3
        channels = [1, *(width * 2**level for level in range(levels))]
        self.convolutions = nn.ModuleList(
            [Conv3d(*pair, 3, padding=1) for pair in pairwise(channels)]
        )
        self.pool = MaxPool3d(2)
        self.dense = nn.Sequential(
            nn.Linear(channels[-1] * 4**3, 64), nn.LeakyReLU(), nn.Linear(64, 2)
        )

    def forward(self, x: Sharded) -> Tensor:
        for convolution in self.convolutions:
            x = self.pool(convolution(x).apply(F.leaky_relu))
        return self.dense(x.whole().flatten(1))  # type: ignore[no-any-return]


def train_cosmoflow(ctx: FragmentContext, folder: str, extent: int) -> None:
    """Each rank reads its part of each field and trains; at the end it reports the error on
    held-out fields.
    """
    grid, extents = Grid.of(ctx.mesh), (extent,) * 3
    torch.manual_seed(1)
    model = CosmoFlow(extent)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = ctx.prepare(model, optimizer)
    targets = torch.from_numpy(np.load(f'{folder}/targets.npy', allow_pickle=False))
    curve = ctx.state.setdefault('losses', [])
    ctx.each_epoch(lambda: curve.append((ctx.samples, ctx.metrics['loss'])))
    for field, (target,) in ctx.loop(
        StackDataset(ShardedVolumes(f'{folder}/fields.npy', grid), TensorDataset(targets)),
        batch_size=8,
    ):
        optimizer.zero_grad()
        loss = F.mse_loss(model(Sharded.of(field, extents, grid)), target)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
    if ctx.is_main:
        Path(folder, f'{ctx.trainer}-losses.json').write_text(json.dumps(curve))
