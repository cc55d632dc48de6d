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

WIDTH, FEW, MANY = 512, 4, 20
_M_MMAP_THRESHOLD = -3
HALVES = Shape(shard=2)
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

    def needed(blocks: int) -> list[int]:
        folder = tmp_path / str(blocks)
        folder.mkdir()
        ordered = order(
            folder,
            total_samples=12,
            checkpoint_every_s=1e-9,
            mode='throughput',
            shape=HALVES,
            shapes={2: HALVES},
            trainer=folder.name,
        )
        with ranks(fork_server, ordered, 2, folder, train, blocks) as gang:
            return [outcome.memory for outcome in gang.run()]

    both = zip(needed(FEW), needed(MANY), strict=True)
    parts = [(many - few) / (MORE / 2) for few, many in both]
    assert all(6.5 < part < 8.5 for part in parts), parts  # a rank that held all would have 14
