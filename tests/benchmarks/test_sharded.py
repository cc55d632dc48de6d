"""Checkpoints of a sharded state by several writers, and restoring it on other numbers of ranks;
run by ``make bench``.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import torch
from torch import nn

from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import WarmParent
from parsl_freetrain.training.spec.messages import CheckpointSaved
from tests.support.ranks import order, ranks, warm_parent

WIDTH, LAYERS = 1024, 80  # 84 M parameters of 4 bytes, and twice as much for Adam: 1.0 GB
SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}


def train(ctx: FragmentContext) -> None:
    """Two steps; reports how long the model took to be read."""
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = ctx.shard(model, blocks=(nn.Linear,))
    began = time.monotonic()
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters()))
    ctx.report(read=time.monotonic() - began)
    for x in ctx.loop(list(torch.ones(16, WIDTH)), 8):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def save(warm: WarmParent, folder: Path, number: int, writers: int) -> CheckpointSaved:
    """The last checkpoint of a fragment of two steps; the next one reads it."""
    ordered = order(
        folder, number, total_samples=16 * number, shape=SHAPES[writers], shapes=SHAPES, keep=1
    )
    with ranks(warm, ordered, writers, folder, train) as gang:
        outcomes = gang.run()
        assert [outcome.how for outcome in outcomes] == ['finished'] * writers
        return gang.ranks[0].said(CheckpointSaved)[-1]


def test_checkpoints_by_several_writers(tmp_path: Path) -> None:
    print(
        f'\nA sharded state of {3 * LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 1e9:.2f} GB '
        f'({os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {tmp_path})'
    )
    with warm_parent(tmp_path) as warm:
        for number, writers in enumerate((1, 2, 4, 1, 2, 4), 1):
            saved = save(warm, tmp_path, number, writers)
            read = f'read in {saved.metrics["read"]:.2f} s' if number > 1 else 'nothing to read'
            print(f'  {writers} ranks: {read}; written and committed in {saved.seconds:.2f} s')
