"""Divided in space, on real ranks, layers give what torch's own give on one, and networks train as
one process does, with a part of its memory.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, Shape
from parsl_freetrain.training.parallel import spatial
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import all_finish, finish, order

STEPS, BATCH = 6, 4


class Net(nn.Module):
    """A small U-Net of torch's own layers, or of those for parts of volumes."""

    def __init__(self, of: Any, channels: int = 4) -> None:
        super().__init__()
        self.down = of.Conv3d(1, channels, 3, padding=1)
        self.norm = of.BatchNorm3d(channels, **({'over_data': True} if of is spatial else {}))
        self.pool = of.MaxPool3d(2)
        self.deep = of.Conv3d(channels, channels, 3, padding=1)
        self.up = of.ConvTranspose3d(channels, channels, 2, stride=2)
        self.last = of.Conv3d(2 * channels, 2, 3, padding=1)

    def forward(self, x: Any) -> Any:
        whole = isinstance(x, Tensor)
        relu: Any = F.relu if whole else lambda part: part.apply(F.relu)
        high = relu(self.norm(self.down(x)))
        deep = relu(self.deep(self.pool(high)))
        if whole:
            return self.last(torch.cat([high, self.up(deep, output_size=high.shape[2:])], 1))
        return self.last(spatial.concatenate([high, self.up(deep, like=high)]))


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
    model, (images, labels), losses = Net(nn).double(), data(extents), []
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
    model = Net(spatial).double()
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
    whole, divided = Net(nn, channels), Net(spatial, channels)
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

CASES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    *(('Conv3d', (4, 6), options) for options in CONVOLUTIONS),
    *(('ConvTranspose3d', (4, 6), options) for options in SPREADS),
    *((pool, (), options) for pool in ('MaxPool3d', 'AvgPool3d') for options in POOLS),
    ('BatchNorm3d', (4,), {}),
    ('BatchNorm3d', (4,), {'affine': False, 'momentum': None}),
]
DIVISIONS = [((4, 1, 1), (17, 5, 6)), ((1, 2, 2), (5, 9, 14))]


def part(tensor: Tensor, volume: spatial.Sharded) -> Tensor:
    """This rank's part of a whole tensor."""
    return tensor[(slice(None), slice(None), *volume.grid.own(volume.layout))]


def differences(ours: nn.Module, theirs: nn.Module, x: Tensor, grid: spatial.Grid) -> list[str]:
    """What is not equal between a layer on parts and torch's layer on the whole."""
    ours.double().load_state_dict(theirs.double().state_dict())
    whole = x.clone().requires_grad_()
    extents = (x.shape[2], x.shape[3], x.shape[4])
    own = (slice(None), slice(None), *grid.own(grid.layout(extents)))
    local = x[own].clone().requires_grad_()
    expected = theirs(whole)
    volume = ours(spatial.Sharded.of(local, extents, grid))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype)
    (expected * weights).sum().backward()
    loss = spatial.total((volume.local * part(weights, volume)).sum(), grid)
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
        f'{theirs} {name}: {one.shape} {other.shape}'
        for name, (one, other) in pairs.items()
        if one.shape != other.shape
        or not torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9)
    ]


def compare_all(
    ctx: FragmentContext, parts: tuple[int, int, int], extents: tuple[int, int, int]
) -> None:
    names = 'data', 'depth', 'height', 'width', 'pipeline'
    grid = spatial.Grid.of(init_device_mesh('cpu', (1, *parts, 1), mesh_dim_names=names))
    torch.manual_seed(1)
    wrong = []
    for kind, arguments, options in CASES:
        x = torch.randn(2, 4, *extents, dtype=torch.float64)
        ours, theirs = (getattr(of, kind)(*arguments, **options) for of in (spatial, nn))
        wrong += differences(ours, theirs, x, grid)
    assert not wrong, '\n'.join(wrong)
    finish(ctx)


@pytest.mark.parametrize(('parts', 'extents'), DIVISIONS, ids=str)
def test_layers_are_torchs(
    fork_server: ForkClient, tmp_path: Path, parts: Any, extents: Any
) -> None:
    """Odd extents, uneven parts, kernels of 1 to 5, strides of 1 to 3, along one axis and two."""
    ordered = order(tmp_path, total_samples=4)
    all_finish(fork_server, ordered, 4, tmp_path, compare_all, parts, extents)
