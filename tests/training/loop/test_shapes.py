"""Fragments whose ranks share more than the data train what one process trains."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from parsl_freetrain import FragmentContext, Shape
from parsl_freetrain.core.model.shape import MESH
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Saved
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import ended, order

SIZE, BATCH, TOTAL, LAYERS, PLACES = 37, 10, 74, 4, 4


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples of some places with three features each; ``noise`` draws augmentation at random."""

    def __init__(self, noise: float = 0.0) -> None:
        made = torch.Generator().manual_seed(1)
        self.x, self.y = (
            torch.randn(SIZE, PLACES, 3, generator=made),
            torch.randn(SIZE, PLACES, 3, generator=made),
        )
        self.noise = noise

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index] + self.noise * torch.randn(PLACES, 3), self.y[index]


class Before(torch.autograd.Function):
    """What the stage before has made; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, hook: torch.Tensor, like: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, got = group, torch.empty_like(like)
        dist.recv(got, group=group, group_src=dist.get_rank(group) - 1)
        return got

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.send(gradient.contiguous(), group=ctx.group, group_dst=dist.get_rank(ctx.group) - 1)
        return torch.zeros(1), None, None


class Behind(torch.autograd.Function):
    """Hands over to the next stage, and gets the gradient from there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.like = group, torch.empty_like(x)
        dist.send(x.detach().contiguous(), group=group, group_dst=dist.get_rank(group) + 1)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.recv(ctx.like, group=ctx.group, group_src=dist.get_rank(ctx.group) + 1)
        return ctx.like, None


class Net(nn.Module):
    """Layers in stages, over parts of the places; sums its gradients over these parts itself."""

    def __init__(self, ctx: FragmentContext, dropout: float) -> None:
        super().__init__()
        self.pipe, self.space = ctx.mesh.get_group('pipeline'), ctx.mesh.get_group('width')
        self.stage, self.stages = dist.get_rank(self.pipe), ctx.shape.pipeline
        whole = [nn.Linear(3, 3) for _ in range(LAYERS)]
        each = LAYERS // self.stages
        self.layers = nn.ModuleDict(
            {str(i): whole[i] for i in range(self.stage * each, (self.stage + 1) * each)}
        )
        self.dropout = nn.Dropout(dropout if self.stage == 0 else 0.0)
        self.parts, self.part = ctx.shape.spatial[2], dist.get_rank(self.space)
        for parameter in self.parameters():
            parameter.register_hook(self._sum)

    def _sum(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=self.space)
        return gradient

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.chunk(self.parts, 1)[self.part], y.chunk(self.parts, 1)[self.part]
        if self.stage:
            x = Before.apply(torch.zeros(1, requires_grad=True), x, self.pipe)  # type: ignore[no-untyped-call]
        for layer in self.layers.values():
            x = self.dropout(torch.tanh(layer(x)))
        if self.stage + 1 < self.stages:
            handed: torch.Tensor = Behind.apply(x, self.pipe)  # type: ignore[no-untyped-call]
            return handed
        return (x - y).pow(2).sum() / (len(x) * PLACES)


def train(
    ctx: FragmentContext,
    *,
    stop: bool = False,
    noise: float = 0.0,
    dropout: float = 0.0,
    seen: Path | None = None,
) -> None:
    model = Net(ctx, dropout)
    inner = model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = ctx.prepare(model, optimizer)
    for x, y in ctx.loop(Points(noise), BATCH):
        if seen is not None:
            with (seen / f'{ctx.rank}').open('a') as file:
                file.write(json.dumps([len(x), float(x.sum()), float(y.sum())]) + '\n')
        if stop:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        ctx.report(stage=inner.stage)
    ctx.state['end'] = ctx.samples


def run(
    fork_server: ForkClient, folder: Path, shape: Shape, fragment: int = 1, **options: Any
) -> Saved:
    ordered = order(folder, fragment, total_samples=TOTAL, mode='throughput', shape=shape)
    outcomes = ended(fork_server, ordered, shape.ranks, folder, train, **options)
    assert {outcome.how for outcome in outcomes} <= {'stopped', 'finished'}, outcomes
    assert {outcome.samples for outcome in outcomes} == {outcomes[0].samples}
    return read_state(outcomes[0].path)


PIPES, BOTH, SPACE = Shape(pipeline=2), Shape(data=2, pipeline=2), Shape(data=2, spatial=(1, 1, 2))


def test_any_shapes_in_turn_train_what_one_process_trains(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    undisturbed = run(fork_server, tmp_path / 'one', Shape())
    shapes = SPACE, Shape(pipeline=4), Shape(data=2)
    for number, shape in enumerate(shapes, 1):
        last = number == len(shapes)
        state = run(fork_server, tmp_path, shape, number, stop=not last)
        assert (state.position.samples == TOTAL) == last
    assert state.position.user == {'end': TOTAL}
    assert state.models[0].keys() == undisturbed.models[0].keys()
    for name, tensor in undisturbed.models[0].items():
        torch.testing.assert_close(state.models[0][name], tensor, rtol=1e-4, atol=1e-6)
    moments, expected = state.optimizers[0]['state'], undisturbed.optimizers[0]['state']
    names = {f'1.layers.{i}.{what}' for i in range(LAYERS) for what in ('weight', 'bias')}
    assert moments.keys() == expected.keys() == names
    for name, kept in expected.items():
        assert float(moments[name]['step']) == float(kept['step'])
        torch.testing.assert_close(moments[name]['exp_avg'], kept['exp_avg'], rtol=1e-3, atol=1e-6)


def test_ranks_of_a_group_see_the_same_samples(fork_server: ForkClient, tmp_path: Path) -> None:
    """Also with samples drawn at random, and if only one stage draws random numbers."""
    seen = tmp_path / 'seen'
    seen.mkdir()
    run(fork_server, tmp_path, BOTH, noise=0.5, dropout=0.5, seen=seen)
    texts = [(seen / f'{rank}').read_text() for rank in range(4)]
    rows = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert rows[0] == rows[1] != rows[2] == rows[3]
    sizes = [first[0] + second[0] for first, second in zip(rows[0], rows[2], strict=True)]
    assert sizes == [10, 10, 10, 7] * 2


def tell_place(ctx: FragmentContext) -> None:
    assert ctx.mesh.mesh_dim_names == MESH
    place = torch.tensor([ctx.rank], dtype=torch.float32)
    for what in ('data', 'width', 'pipeline'):
        row = [torch.zeros(1) for _ in range(ctx.mesh[what].size())]
        dist.all_gather(row, place, group=ctx.mesh.get_group(what))
        ctx.report(**{f'{what}{i}': float(rank) for i, rank in enumerate(row)})
    connections = [
        c for c in psutil.Process().net_connections('tcp') if c.status == psutil.CONN_ESTABLISHED
    ]
    for connection in connections:
        try:
            fd = os.dup(connection.fd)
        except OSError:
            continue  # closed since it was listed
        with socket.socket(fileno=fd) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 0, connection
    raise RuntimeError(f'{ctx.shape}, {len(connections) > 2 * (ctx.world_size - 1)}')


def test_ranks_count_along_the_pipeline_first(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, mode='throughput', shape=Shape(data=2, pipeline=2))
    outcomes = ended(fork_server, ordered, 4, tmp_path, tell_place)
    assert outcomes[0].error.message == 'data 2 x spatial 1x1x1 x pipeline 2, True'
    assert [outcome.metrics for outcome in outcomes] == [
        {
            'data0': first,
            'data1': first + 2,
            'width0': rank,
            'pipeline0': rank - rank % 2,
            'pipeline1': rank - rank % 2 + 1,
        }
        for rank, first in ((0, 0), (1, 1), (2, 0), (3, 1))
    ]


def clipped(ctx: FragmentContext) -> None:
    model = nn.Linear(1, 1)
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=1.0)


def train_a_part(ctx: FragmentContext) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(2, 5)
    ctx.prepare(model, torch.optim.SGD([*model.parameters(), other.weight], lr=0.1))


def test_what_a_shape_cannot_do_is_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (train_a_part, {'shape': PIPES}, 'parameter of shape (5, 2) that is of none of the models'),
        (clipped, {'shape': Shape(data=4)}, 'pipeline 1 is for 4 ranks, but there are 2'),
        (clipped, {'shape': PIPES, 'mode': 'reproducible'}, 'and the mode is reproducible'),
        (clipped, {'shape': PIPES, 'on_nan': 'skip'}, "on_nan is 'skip', but a single stage of a"),
        (clipped, {'shape': PIPES}, 'clip_grad_norm, but each rank of a pipeline holds the gradi'),
    ]
    for function, changes, sentence in cases:
        ordered = order(tmp_path, **{'mode': 'throughput', **changes})
        outcomes = ended(fork_server, ordered, 2, tmp_path, function)
        assert sentence in outcomes[0].error.message
