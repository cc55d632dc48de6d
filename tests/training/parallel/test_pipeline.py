"""Pipelines of real ranks train what one process trains, by any method and size."""

import hashlib
import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from parsl_freetrain import BadInput, FragmentContext, Shape
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Saved
from parsl_freetrain.training.parallel.pipeline import Pipeline
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import all_finish, ended, finish, order
from workflows.pipeline_facts import activations

SIZES = [16, 13, 3, 1]
"""Samples of batches: some that micro-batches don't divide, and fewer than micro-batches."""
STEPS = 8


def layer(given: int, gives: int) -> nn.Module:
    """Another width on each side; every second one sends no contiguous memory."""
    return nn.Sequential(
        nn.Linear(given, gives), nn.Tanh(), Over() if given > gives else nn.Identity()
    ).double()


class Over(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1).T.clone().T


WIDTHS = (6, 9), (9, 7), (7, 8), (8, 8), (8, 5), (5, 4), (4, 3)
MAKERS = [partial(layer, *widths) for widths in WIDTHS]


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(n, 6, generator=drawn, dtype=torch.double),
            torch.randn(n, 3, generator=drawn, dtype=torch.double),
        )
        for n in SIZES * (STEPS // len(SIZES))
    ]


def train_side_by_side(ctx: FragmentContext, runs: list[tuple[str, int]]) -> None:
    """Train by each of (method, micro-batches), and here alone; compare at each step."""
    everybody = dist.group.WORLD
    for method, micro_batches in runs:
        how: Any = {'method': method, 'micro_batches': micro_batches}
        pipeline = Pipeline(MAKERS, F.mse_loss, group=everybody, **how)
        alone = Pipeline(MAKERS, F.mse_loss, micro_batches=1)
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (pipeline, alone)]
        whole = dict(alone.named_parameters())
        for x, y in batches():
            expected = F.mse_loss(alone(x), y)
            optimizers[1].zero_grad()
            expected.backward()
            torch.testing.assert_close(pipeline.step(x, y), expected.detach())
            for name, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter.grad, whole[name].grad)
            for optimizer in optimizers:
                optimizer.step()
            assert pipeline.most_kept == activations(pipeline.schedule)[ctx.rank]
            holders = holders_of(pipeline, ctx.world_size)
            assert all(len(digests) == 1 for digests in holders.values()), (
                'the holders of a layer differ'
            )
        assert holders.keys() == {str(number) for number in range(len(MAKERS))}
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter, whole[name], rtol=1e-9, atol=1e-9)
    finish(ctx)


def holders_of(pipeline: Pipeline, world_size: int) -> dict[str, set[bytes]]:
    """By layer: digests of its parameters and their gradients at the ranks that have it."""
    own = {
        number: hashlib.sha256(
            b''.join(
                t.detach().numpy().tobytes()
                for p in layer.parameters()
                for t in (p, p.grad)
                if t is not None
            )
        ).digest()
        for number, layer in pipeline.layers.items()
    }
    rows: list[dict[str, bytes]] = [{} for _ in range(world_size)]
    dist.all_gather_object(rows, own)
    return {n: {row[n] for row in rows if n in row} for row in rows for n in row}


@pytest.mark.parametrize(
    ('world_size', 'runs'),
    [
        (2, [('gpipe', 3), ('1f1b', 4), ('chimera', 2)]),
        pytest.param(4, [('1f1b', 6), ('chimera', 4), ('chimera', 6)], marks=pytest.mark.long),
    ],
)
def test_every_method_trains_as_one_process_does(
    fork_server: ForkClient, tmp_path: Path, world_size: int, runs: list[tuple[str, int]]
) -> None:
    all_finish(fork_server, order(tmp_path), world_size, tmp_path, train_side_by_side, runs)


class Spectrum(nn.Module):
    """Hands complex numbers over to the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.fft.rfft(self.linear(x.float()))
        return y


class Filter(nn.Module):
    """Takes complex numbers, and has complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.fft.irfft(x * self.weight)[..., :3].double()
        return y


def compare_gradients(ctx: FragmentContext, stages: list[list[Any]]) -> None:
    for makers, method in itertools.product(stages, ('1f1b', 'chimera')):
        how: Any = {'method': method, 'micro_batches': 2}
        pipeline = Pipeline(makers, F.mse_loss, group=dist.group.WORLD, **how)
        alone = Pipeline(makers, F.mse_loss, micro_batches=1)
        x, y = batches()[0]
        torch.testing.assert_close(pipeline.step(x, y), alone.step(x, y))
        whole = dict(alone.named_parameters())
        for name, parameter in pipeline.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, makers
            torch.testing.assert_close(parameter.grad, whole[name].grad)
    finish(ctx)


def test_stages_without_parameters_or_complex_ones(fork_server: ForkClient, tmp_path: Path) -> None:
    linear = partial(layer, 6, 3)
    stages = [[linear, nn.Tanh], [nn.Tanh, linear], [Spectrum, Filter]]
    all_finish(fork_server, order(tmp_path), 2, tmp_path, compare_gradients, stages)


def refused(ctx: FragmentContext, makers: list[Any], options: dict[str, Any]) -> None:
    pipeline = Pipeline(makers, F.mse_loss, group=dist.group.WORLD, **options)
    pipeline.step(torch.ones(4, 6), torch.ones(4, 6))
    pipeline(torch.ones(4, 6))


def pair() -> nn.Module:
    return nn.LSTM(6, 6)


def test_what_cannot_be_is_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    norm, linear = partial(nn.BatchNorm1d, 6), partial(nn.Linear, 6, 6)
    plain: dict[str, Any] = {'method': '1f1b'}
    cases: list[tuple[list[Any], dict[str, Any], str]] = [
        ([nn.Identity] * 2, {'method': 'gpipe'}, '2 layers cannot be cut into 3 stages'),
        ([nn.Identity] * 3, {'method': 'chimera'}, 'even number of stages'),
        ([nn.Identity, norm, nn.Identity], plain, 'Layer 1 has batch norm'),
        ([pair, nn.Identity, nn.Identity], plain, 'Stage 0 of the pipeline gives a tuple to the n'),
        ([linear] * 3, {**plain, 'micro_batches': 2}, 'No rank of a pipeline of 3 stages has all'),
    ]
    for makers, options, words in cases:
        outcomes = ended(fork_server, order(tmp_path), 3, tmp_path, refused, makers, options)
        errors = [outcome.error for outcome in outcomes if outcome.how == 'error']
        said = [error.message for error in errors if error.type == BadInput.__name__]
        assert any(words in one for one in said), errors


def test_initial_weights_do_not_depend_on_what_else_is_drawn() -> None:
    torch.manual_seed(1)
    one = Pipeline(MAKERS, F.mse_loss, seed=5)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    two = Pipeline(MAKERS, F.mse_loss, seed=5)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    other = Pipeline(MAKERS, F.mse_loss, seed=6)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def train(ctx: FragmentContext, *, stop: bool = False, dies: int | None = None) -> None:
    group = ctx.mesh.get_group('pipeline')
    model = Pipeline(MAKERS, F.mse_loss, method='chimera', micro_batches=4, group=group, seed=2)
    _, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    drawn = torch.Generator().manual_seed(4)
    rows = (torch.randn(25, width, generator=drawn, dtype=torch.double) for width in (6, 3))
    for x, y in ctx.loop(TensorDataset(*rows), 10):
        if stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if ctx.rank == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        ctx.report(loss=model.step(x, y).item())
        optimizer.step()


def fragment(
    fork_server: ForkClient, folder: Path, number: int, shape: Shape, *, stop: bool
) -> Saved:
    ordered = order(folder, number, total_samples=75, mode='throughput', shape=shape)
    outcomes = ended(fork_server, ordered, shape.ranks, folder, train, stop=stop)
    assert {outcome.how for outcome in outcomes} == {'stopped' if stop else 'finished'}, outcomes
    return read_state(outcomes[0].path)


def test_a_training_goes_on_in_other_shapes(fork_server: ForkClient, tmp_path: Path) -> None:
    """Chimera of two and four stages, of two copies; the last batch is smaller."""
    shapes = (Shape(pipeline=2), Shape(pipeline=4), Shape(data=2, pipeline=2), Shape(data=2))
    for number, shape in enumerate(shapes, 1):
        state = fragment(fork_server, tmp_path, number, shape, stop=number < 4)
    expected = fragment(fork_server, tmp_path / 'alone', 1, Shape(), stop=False)
    assert state.models[0].keys() == expected.models[0].keys()
    for name, tensor in expected.models[0].items():
        torch.testing.assert_close(state.models[0][name], tensor, rtol=1e-9, atol=1e-9)


def test_when_a_stage_dies_the_others_know(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=75, mode='throughput', shape=Shape(pipeline=4))
    outcomes = ended(fork_server, ordered, 4, tmp_path, train, dies=2)
    assert [one.how for one in outcomes] == ['peer-lost', 'peer-lost', None, 'peer-lost']


def train_one_stage(ctx: FragmentContext, bad: int, scales: bool = False) -> None:
    """A copy of the pipeline at each rank; rank 1's loss is not a number at ``bad``."""
    scaler = torch.amp.GradScaler('cpu', enabled=scales)
    model = Pipeline(MAKERS, lambda y, t: scaler.scale(F.mse_loss(y, t)), micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, scaler = ctx.prepare(model, optimizer, scaler)
    for x, y in ctx.loop(
        TensorDataset(torch.ones(8, 6, dtype=torch.double), torch.ones(8, 3, dtype=torch.double)), 8
    ):
        model.step(x * (float('nan') if ctx.rank and ctx.samples == bad else 1), y)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize('scales', [False, True])
def test_copies_of_a_stage_leave_a_bad_step_out(
    fork_server: ForkClient, tmp_path: Path, scales: bool
) -> None:
    ordered = order(tmp_path, total_samples=32, mode='throughput', on_nan='skip')
    outcomes = all_finish(fork_server, ordered, 2, tmp_path, train_one_stage, 16, scales)
    metrics = {} if scales else {'skipped_steps': 1.0}
    assert [outcome.metrics for outcome in outcomes] == [metrics] * 2
    ordered = order(tmp_path / 'clean', total_samples=24, mode='throughput')
    clean_one = all_finish(fork_server, ordered, 2, tmp_path, train_one_stage, 99)[0]
    clean = read_state(clean_one.path).models[0]
    for name, tensor in read_state(outcomes[0].path).models[0].items():
        torch.testing.assert_close(tensor, clean[name])
