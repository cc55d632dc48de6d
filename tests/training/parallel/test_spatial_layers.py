"""Every layer of divided volumes, on real ranks, gives what torch's own gives on one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.parallel.spatial import (
    AvgPool3d,
    BatchNorm3d,
    Conv3d,
    ConvTranspose3d,
    Grid,
    MaxPool3d,
    Sharded,
    total,
)
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import all_finish, finish, order

CONVOLUTIONS: list[dict[str, Any]] = [
    *(
        {'kernel_size': k, 'stride': s, 'padding': k // 2}
        for k, s in itertools.product((1, 3, 5), (1, 2))
    ),
    {'kernel_size': 3},
    {'kernel_size': 3, 'stride': 3, 'padding': 1},
    {'kernel_size': 3, 'padding': 2, 'dilation': 2},
    {'kernel_size': 2, 'stride': 2},
    {'kernel_size': 4, 'stride': 2, 'padding': 1},
    {'kernel_size': (1, 3, 5), 'padding': (0, 1, 2)},
    {'kernel_size': 3, 'padding': 1, 'groups': 2, 'bias': False},
]
SPREADS: list[dict[str, Any]] = [
    {'kernel_size': 2, 'stride': 2},
    {'kernel_size': 3, 'stride': 2, 'padding': 1, 'output_padding': 1},
    {'kernel_size': 4, 'stride': 2, 'padding': 1},
    {'kernel_size': 3, 'padding': 1},
    {'kernel_size': 3},
    {'kernel_size': 3, 'dilation': 2, 'padding': 1},
    {'kernel_size': 2, 'stride': 3, 'output_padding': 2},
]
POOLS = [
    {'kernel_size': 2},
    {'kernel_size': 3, 'stride': 2, 'padding': 1},
    {'kernel_size': 3, 'stride': 1},
    {'kernel_size': 2, 'stride': 1},
]

CASES: list[tuple[str, Any, Any, tuple[int, ...], dict[str, Any]]] = [
    *(('convolution', Conv3d, nn.Conv3d, (4, 6), options) for options in CONVOLUTIONS),
    *(('transposed', ConvTranspose3d, nn.ConvTranspose3d, (4, 6), options) for options in SPREADS),
    *(('max', MaxPool3d, nn.MaxPool3d, (), options) for options in POOLS),
    *(('average', AvgPool3d, nn.AvgPool3d, (), options) for options in POOLS),
    ('norm', BatchNorm3d, nn.BatchNorm3d, (4,), {}),
    ('norm', BatchNorm3d, nn.BatchNorm3d, (4,), {'affine': False, 'momentum': None}),
]

DIVISIONS = [((4, 1, 1), (17, 5, 6)), ((1, 2, 2), (5, 9, 14))]


def grid_of(spatial: tuple[int, int, int], data: int = 1) -> Grid:
    names = ('data', 'depth', 'height', 'width', 'pipeline')
    return Grid.of(init_device_mesh('cpu', (data, *spatial, 1), mesh_dim_names=names))


def part(tensor: Tensor, volume: Sharded) -> Tensor:
    """This rank's part of a whole tensor."""
    return tensor[(slice(None), slice(None), *volume.grid.own(volume.layout))]


def differences(kind: str, ours: nn.Module, theirs: nn.Module, x: Tensor, grid: Grid) -> list[str]:
    """What is not equal between a layer on parts and torch's layer on the whole."""
    ours.double().load_state_dict(theirs.double().state_dict())
    whole = x.clone().requires_grad_()
    extents = (x.shape[2], x.shape[3], x.shape[4])
    own = (slice(None), slice(None), *grid.own(grid.layout(extents)))
    local = x[own].clone().requires_grad_()
    expected = theirs(whole)
    volume = ours(Sharded.of(local, extents, grid))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    (expected * weights).sum().backward()
    loss = total((volume.local * part(weights, volume)).sum(), grid)
    loss.backward()
    assert whole.grad is not None and local.grad is not None
    pairs = {
        'output': (volume.local, part(expected, volume)),
        'loss': (loss, (expected * weights).sum()),
        'gathered': (volume.whole(), expected),
        'gradient': (local.grad, whole.grad[own]),
    }
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        pairs[f'gradient of {name}'] = one.grad, other.grad
    pairs |= {
        name: (one, other)
        for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True)
    }
    return [
        f'{kind} {theirs} {name}: {one.shape} {other.shape}'
        for name, (one, other) in pairs.items()
        if one.shape != other.shape
        or not torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9)
    ]


def compare_all(
    ctx: FragmentContext, spatial: tuple[int, int, int], extents: tuple[int, int, int]
) -> None:
    grid = grid_of(spatial)
    torch.manual_seed(1)
    wrong = []
    for kind, ours, theirs, arguments, options in CASES:
        x = torch.randn(2, 4, *extents, dtype=torch.float64)
        layers = ours(*arguments, **options), theirs(*arguments, **options)
        wrong += differences(kind, *layers, x, grid)
    assert not wrong, '\n'.join(wrong)
    finish(ctx)


@pytest.mark.parametrize(('spatial', 'extents'), DIVISIONS, ids=str)
def test_layers_are_torchs(
    fork_server: ForkClient,
    tmp_path: Path,
    spatial: tuple[int, int, int],
    extents: tuple[int, int, int],
) -> None:
    """Odd extents, uneven parts, kernels of 1 to 5, strides of 1 to 3, along one axis and two."""
    ordered = order(tmp_path, total_samples=4)
    all_finish(fork_server, ordered, 4, tmp_path, compare_all, spatial, extents)
