"""What the ranks of a sharded model say of the memory that they have needed."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import nn

from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks

WIDTH, FEW, MANY = 512, 8, 40
_M_MMAP_THRESHOLD = -3
SHAPES = {1: Shape(), 4: Shape(shard=4)}
MORE = 4 * WIDTH**2 * (MANY - FEW)
"""Bytes of the parameters by which the deeper model is larger."""


def train(ctx: FragmentContext, blocks: int) -> None:
    # What malloc keeps of freed memory depends on the order of what is freed.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))
        )
    model = ctx.shard(model, blocks=(nn.Linear,))
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters()))
    for x in ctx.loop([torch.ones(WIDTH)] * 12, 4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


def test_a_rank_needs_memory_for_its_part_of_the_state(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    """Of two depths with the same blocks, so that libraries, exchanges and the block that is
    gathered cancel out: parameters, gradients, two moments, and the copy that a checkpoint makes of
    all but gradients.
    """

    def needed(shape: Shape, blocks: int) -> list[int]:
        folder = tmp_path / f'{shape.ranks}-{blocks}'
        folder.mkdir()
        ordered = order(
            folder,
            total_samples=12,
            checkpoint_every_s=1e-9,
            mode='throughput',
            shape=shape,
            shapes=SHAPES,
            trainer=folder.name,
        )
        with ranks(fork_server, ordered, shape.ranks, folder, train, blocks) as gang:
            return [outcome.memory for outcome in gang.run()]

    for shape in SHAPES.values():
        pairs = zip(needed(shape, FEW), needed(shape, MANY), strict=True)
        parts = [(many - few) / (MORE / shape.ranks) for few, many in pairs]
        assert all(6.5 < part < 8.5 for part in parts), (shape, parts)
