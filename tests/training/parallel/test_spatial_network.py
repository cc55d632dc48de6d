"""Networks divided in space train as one process does, with a part of its memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, Shape
from parsl_freetrain.training.parallel import spatial
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import all_finish, finish, order

STEPS, BATCH = 6, 4


class Divided(nn.Module):
    """A small U-Net on parts of volumes."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.down = spatial.Conv3d(1, channels, 3, padding=1)
        self.norm = spatial.BatchNorm3d(channels, over_data=True)
        self.pool = spatial.MaxPool3d(2)
        self.deep = spatial.Conv3d(channels, channels, 3, padding=1)
        self.up = spatial.ConvTranspose3d(channels, channels, 2, stride=2)
        self.last = spatial.Conv3d(2 * channels, 2, 3, padding=1)

    def forward(self, x: spatial.Sharded) -> spatial.Sharded:
        high = self.norm(self.down(x)).apply(F.relu)
        deep = self.deep(self.pool(high)).apply(F.relu)
        return self.last(spatial.concatenate([high, self.up(deep, like=high)]))  # type: ignore[no-any-return]


class Whole(nn.Module):
    """The same of torch's own layers."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, channels, 3, padding=1)
        self.norm = nn.BatchNorm3d(channels)
        self.pool = nn.MaxPool3d(2)
        self.deep = nn.Conv3d(channels, channels, 3, padding=1)
        self.up = nn.ConvTranspose3d(channels, channels, 2, stride=2)
        self.last = nn.Conv3d(2 * channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.norm(self.down(x)))
        deep = F.relu(self.deep(self.pool(high)))
        return self.last(torch.cat([high, self.up(deep, output_size=high.shape[2:])], 1))  # type: ignore[no-any-return]


def data(extents: tuple[int, int, int], samples: int = STEPS * BATCH) -> tuple[Tensor, Tensor]:
    """Noise, and where it is smooth and high: something to learn."""
    images = torch.randn(
        samples, 1, *extents, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    return images, (F.avg_pool3d(images, 3, 1, 1)[:, 0] > 0.1).long()


def part_of(tensor: Tensor, grid: spatial.Grid, extents: tuple[int, int, int]) -> Tensor:
    return tensor[(..., *grid.own(grid.layout(extents)))].clone()


def trained_alone(extents: tuple[int, int, int]) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(3)
    model, (images, labels), losses = Whole().double(), data(extents), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        mine = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train(ctx: FragmentContext, extents: tuple[int, int, int]) -> None:
    """Steps in this fragment's shape, beside the same ones in one process."""
    grid = spatial.Grid.of(ctx.mesh)
    reference, expected = trained_alone(extents)
    torch.manual_seed(3)
    model = Divided().double()
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    images, labels = data(extents)
    parts = TensorDataset(part_of(images, grid, extents), part_of(labels, grid, extents))
    voxels = math.prod(extents)
    losses = []
    for image, label in ctx.loop(parts, BATCH, shuffle=False):
        optimizer.zero_grad()
        made = model(spatial.Sharded.of(image, extents, grid)).local
        loss = spatial.total(
            F.cross_entropy(made, label, reduction='sum') / (len(image) * voxels), grid
        )
        loss.backward()
        optimizer.step()
        losses.append(grid.data.add(loss.detach()).item() / grid.data.parts)
    assert losses == pytest.approx(expected, rel=1e-9)
    state = {name.removeprefix('module.'): value for name, value in model.state_dict().items()}
    wrong = [
        f'{name}: {(state[name] - value).abs().max()}'
        for name, value in reference.state_dict().items()
        if not torch.allclose(state[name], value, rtol=1e-9, atol=1e-9)
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ('shape', 'extents'),
    [(Shape(data=2, spatial=(2, 1, 1)), (9, 6, 7)), (Shape(spatial=(1, 2, 2)), (5, 11, 9))],
    ids=str,
)
def test_steps_are_those_of_one_process(
    fork_server: ForkClient, tmp_path: Path, shape: Shape, extents: tuple[int, int, int]
) -> None:
    """Loss curve and weights: statistics, odd extents, uneven parts, a skip connection."""
    ordered = order(tmp_path, total_samples=STEPS * BATCH, mode='throughput', shape=shape)
    all_finish(fork_server, ordered, 4, tmp_path, train, extents)


def kept_bytes(run: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes that a forward pass keeps for backward, each once, without parameters."""
    seen: dict[int, int] = {}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    assert loss.requires_grad
    return sum(size for pointer, size in seen.items() if pointer not in known)


def measure(ctx: FragmentContext) -> None:
    """Memory and traffic of one step; every rank looks at its own."""
    extents, channels, samples = (64, 12, 12), 4, 2
    grid = spatial.Grid.of(ctx.mesh)
    torch.manual_seed(3)
    whole, divided = Whole(channels), Divided(channels)
    x = torch.randn(samples, 1, *extents)
    local = part_of(x, grid, extents)
    alone = kept_bytes(lambda: whole(x).sum(), whole)
    mine = kept_bytes(
        lambda: divided(spatial.Sharded.of(local, extents, grid)).local.sum(), divided
    )
    parts, index = grid.parts, grid.axes[0].index
    beside = (index > 0) + (index < parts - 1)
    # The halos of the three convolutions: one layer of voxels on each side that has a neighbour, at
    # full and at half resolution.
    halos = 4 * samples * beside * ((1 + 2 * channels) * 12 * 12 + channels * 6 * 6)
    assert mine - halos == pytest.approx(alone / parts, rel=0.01), (mine, alone, halos)

    sent: list[int] = []
    really = dist.batch_isend_irecv

    def counted(operations: list[Any]) -> Any:
        sent.extend(o.tensor.nbytes for o in operations if o.op is dist.isend)
        return really(operations)

    dist.batch_isend_irecv = counted  # type: ignore[assignment]
    try:
        local.requires_grad_()
        made = divided(spatial.Sharded.of(local, extents, grid)).local.sum()
        assert sum(sent) == halos
        sent.clear()
        made.backward()
        assert sum(sent) == halos
        sent.clear()
        spatial.Conv3d(1, 3, 1)(spatial.Sharded.of(local, extents, grid)).local.sum().backward()
        assert not sent  # a halo of width 0
    finally:
        dist.batch_isend_irecv = really
    finish(ctx)


def test_memory_is_a_part_and_the_halo_is_sent(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=4, mode='throughput', shape=Shape(spatial=(4, 1, 1)))
    all_finish(fork_server, ordered, 4, tmp_path, measure)
