"""What a loop may do around its step: hooks and moving averages; what it must not do is refused."""

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from parsl_freetrain import FragmentContext, Reproducible, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import made
from tests.support.examples import in_this_process, refused_here
from tests.support.ranks import all_finish, ended, in_ranks, order

DATA = TensorDataset(torch.arange(32.0).reshape(16, 2) / 32)


def train(
    ctx: FragmentContext,
    inside: Callable[[Any], object] = lambda model: None,
    model: Any = None,
    optimizer: Any = None,
    before_step: Callable[[Any], object] = lambda model: None,
) -> None:
    if model is None:
        model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        before_step(model)
        optimizer.step()
        inside(model)


run = partial(in_ranks, total_samples=32)


def averages_around(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    average = AveragedModel(getattr(model, 'module', model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for (x,) in ctx.loop(DATA, 4):
        model(x).pow(2).mean().backward()
        optimizer.step()
        average.update_parameters(getattr(model, 'module', model))


def averages_prepared(ctx: FragmentContext, often: Callable[[int], bool] = lambda _: True) -> None:
    """As in a script for one process, with its DataLoader."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    stochastic = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, average, optimizer, stochastic = ctx.prepare(model, average, optimizer, stochastic)
    ctx.each_epoch(lambda: stochastic.update_parameters(model))
    for (x,) in ctx.loop(DataLoader(DATA, batch_size=4, shuffle=True)):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if often(ctx.samples):
            average.update_parameters(model)
    assert (average.n_averaged, stochastic.n_averaged) == (ctx.samples // 4, ctx.samples // 16)


def averages_some_steps(ctx: FragmentContext) -> None:
    averages_prepared(ctx, lambda samples: samples == 0)


def clamps_weights(ctx: FragmentContext) -> None:
    def clamp(model: Any) -> None:
        with torch.no_grad():
            model.weight.clamp_(-0.1, 0.1)

    train(ctx, clamp)


def clips_in_the_loop(ctx: FragmentContext) -> None:
    train(ctx, before_step=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def reads_gradients(ctx: FragmentContext) -> None:
    train(ctx, before_step=lambda model: ctx.report(norm=model.weight.grad.norm()))


def reads_gradients_afterwards(ctx: FragmentContext) -> None:
    train(ctx, lambda model: ctx.report(norm=sum(p.grad.norm() for p in model.parameters())))


def reads_gradients_of_micro_batches(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4, micro_batch=2):
        model(x).pow(2).mean().backward()
        assert float(next(model.parameters()).grad.norm()) < 100
        optimizer.step()


def may_read_gradients(ctx: FragmentContext) -> None:
    """Gradients of other times, of one shard, and those that it clears itself."""
    model, optimizer = made(ctx)
    ctx.before_step(lambda: ctx.report(norm=model.weight.grad.norm()))
    for (x,) in ctx.loop(DATA, 4):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        (first,) = torch.autograd.grad(model(x).sum(), model.weight)
        (model(x).pow(2).mean() + 0 * first.sum()).backward()
        if ctx.spec.shards == 1:
            assert model.weight.grad.shape == first.shape
        optimizer.step()
        copied = copy.deepcopy(model)
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        for parameter in model.parameters():  # as scripts did before zero_grad
            if parameter.grad is not None:
                parameter.grad.detach_()
                parameter.grad.zero_()
                parameter.grad.data.zero_()
        model(x).pow(2).mean().backward()  # what a second loss leaves is cleared
        optimizer.zero_grad()
        model.zero_grad()
        assert isinstance(model.weight, nn.Parameter)
    assert type(model.weight) is nn.Parameter and ctx.metrics['norm'] > 0


class Memory:
    """As the cross-batch memory of metric learning, and the neighbours of temporal graphs."""

    __module__ = 'memories.of_rows'

    def __init__(self) -> None:
        self.rows, self.filled = torch.zeros(8, 2), 0

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[self.filled : self.filled + len(x)] = x.detach()
        self.filled = (self.filled + len(x)) % 8
        return (x - self.rows.mean(0)).pow(2).mean()


def fills_a_memory_of_a_package(ctx: FragmentContext) -> None:
    installed = ModuleType('memories.of_rows')
    installed.__file__ = '/lib/site-packages/memories/of_rows.py'
    sys.modules[installed.__name__] = installed
    model, optimizer = made(ctx, outputs=2)
    memory = Memory()
    for (x,) in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        memory.loss(model(x)).backward()
        optimizer.step()


def averages_too_late(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        ctx.ema(model, 0.9)
        optimizer.step()
        model(x)


REFUSED = {
    averages_around: 'changed average.module.weight, a parameter or buffer that was',
    averages_some_steps: 'called update_parameters of an AveragedModel in some iterations',
    clamps_weights: "changed the parameter 'weight'. In reproducible mode it runs once per",
    clips_in_the_loop: 'ctx.prepare(..., clip_grad_norm=...)',
    reads_gradients: 'ctx.loop read the gradient of a parameter after backward(). In rep',
    reads_gradients_afterwards: 'or change it in any other way in ctx.before_step(fn)',
    fills_a_memory_of_a_package: 'changed package:memory.rows, a Tensor. It runs once',
    averages_too_late: 'ctx.ema must be called after ctx.prepare and before ctx.loop',
}


@pytest.mark.parametrize('function', REFUSED)
def test_what_would_depend_on_the_nodes_is_refused(function: Callable[..., None]) -> None:
    assert REFUSED[function] in refused_here(function, total_samples=32)


def test_a_metric_that_changes_its_tensors_is_no_memory() -> None:
    metrics = pytest.importorskip('torchmetrics.classification')

    def trains(ctx: FragmentContext) -> None:
        metric: Any = metrics.BinaryConfusionMatrix()
        its, said = nn.ModuleDict({'a': metric}), torch.ones(2).long()
        train(ctx, lambda model: (its, metric.update(said, said)), *made(ctx))

    in_this_process(trains, total_samples=32)


def test_throughput_mode_refuses_what_is_lost(fork_server: ForkClient, tmp_path: Path) -> None:
    (outcome,) = run(fork_server, tmp_path / 'lost', averages_around, mode='throughput')
    assert 'would be lost at the end of the fragment' in outcome.error.message
    ordered = order(tmp_path, mode='throughput')
    for one in ended(fork_server, ordered, 2, tmp_path, fills_a_memory_of_a_package):
        assert 'the norm of package:memory.rows is ' in one.error.message
    for function in (clips_in_the_loop, clamps_weights):
        (outcome,) = run(fork_server, tmp_path / function.__name__, function, mode='throughput')
        assert outcome.how == 'finished', outcome.error


def adversarial(ctx: FragmentContext, first: int) -> None:
    both = [nn.Linear(2, 2) for _ in '12']
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in both]
    maker, critic, *optimizers = ctx.prepare(*both, *steps)
    for (x,) in ctx.loop(DATA, 4):
        made = maker(x)
        for number in (first, 1 - first):
            optimizers[number].zero_grad()
            critic(made.detach() if number else made).mean().backward()
            optimizers[number].step()


def test_a_network_behind_its_step_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    for first in (0, 1):
        in_this_process(partial(adversarial, first=first), total_samples=32)
        notes = capsys.readouterr().out.count('Note: a Linear is used behind step() of its optim')
        assert notes == first


def test_a_gradient_of_a_part_cannot_be_read(fork_server: ForkClient, tmp_path: Path) -> None:
    function = reads_gradients_of_micro_batches
    (outcome,) = run(fork_server, tmp_path / 'micro', function, mode='throughput')
    assert 'With micro_batch it is the gradient of a micro-batch' in outcome.error.message
    for shards in (1, 4):
        (outcome,) = run(fork_server, tmp_path / str(shards), may_read_gradients, shards=shards)
        assert outcome.how == 'finished', outcome.error


def averages(ctx: FragmentContext) -> None:
    """An average, a clipped gradient and clamped weights, by hooks."""
    model, optimizer = made(ctx)
    average = ctx.ema(model, 0.8)
    inner = getattr(model, 'module', model)
    noisy = isinstance(ctx.spec.mode, Reproducible)  # random numbers are the same for any ranks

    def before() -> None:
        inner.weight.grad.add_(torch.rand(()) * noisy)
        nn.utils.clip_grad_norm_(inner.parameters(), 0.05)

    def after() -> None:
        with torch.no_grad():
            inner.weight.add_(0.01 * torch.randn(2) * noisy).clamp_(-0.3, 0.3)
        ctx.state['steps'] = ctx.state.get('steps', 0) + 1
        ctx.state.setdefault('norms', []).append(float(next(average.parameters()).norm()))

    ctx.before_step(before)
    ctx.after_step(after)
    for (x,) in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
    assert ctx.state['steps'] == ctx.samples // 4 and len(set(ctx.state['norms'])) > 2


@pytest.mark.parametrize(
    ('function', 'mode'),
    [(averages, 'reproducible'), (averages, 'throughput'), (averages_prepared, 'reproducible')],
)
def test_hooks_act_once_per_step_and_an_average_is_saved(
    fork_server: ForkClient, tmp_path: Path, function: Callable[..., None], mode: str
) -> None:
    """The same bits, averages included, on one rank and on three ranks and then two."""
    (outcome,) = run(fork_server, tmp_path / 'one', function, mode=mode)
    assert outcome.how == 'finished', outcome.error
    for fragment, world_size, total in ((1, 3, 16), (2, 2, 32)):
        ordered = order(tmp_path / 'cut', fragment, total_samples=total, mode=mode)
        outcomes = all_finish(fork_server, ordered, world_size, tmp_path / 'cut', function)
    one, cut = load_weights(outcome.path), load_weights(outcomes[0].path)
    assert {name.split('.')[0] for name in one} >= {'model', 'ema'}
    weight = next(name for name in one if name.startswith('ema.') and name.endswith('weight'))
    own = weight.replace('ema.', 'model.').replace('module.', '')
    assert not torch.equal(one[weight], one[own])
    for name in one:
        if mode == 'reproducible':
            assert torch.equal(one[name], cut[name]), name
        else:
            torch.testing.assert_close(one[name], cut[name])


@pytest.mark.parametrize('name', ['before_step', 'after_step', 'each_epoch'])
def test_what_would_be_called_is_a_function_and_is_added_before_the_loop(name: str) -> None:
    def in_the_loop(ctx: FragmentContext) -> None:
        train(ctx, lambda model: getattr(ctx, name)(lambda: None))

    def called_already(ctx: FragmentContext) -> None:
        getattr(ctx, name)(None)

    said = refused_here(in_the_loop, total_epochs=1)
    assert f'ctx.{name} was called in the body of ctx.loop' in said
    said = refused_here(called_already, total_epochs=1)
    assert f'ctx.{name} was given a NoneType; it takes a function' in said


def test_random_numbers_at_the_end_of_an_epoch(fork_server: ForkClient, tmp_path: Path) -> None:
    """In throughput mode too, where the ranks draw numbers of their own in the loop."""

    def draws(ctx: FragmentContext) -> list[float]:
        drawn: list[float] = []
        ctx.each_epoch(lambda: drawn.append(torch.rand(()).item()))
        train(ctx, lambda model: drawn.append(torch.rand(()).item()))
        return drawn

    found = run(fork_server, tmp_path, draws, world_size=2, mode='throughput')
    one, other = (json.loads(outcome.result) for outcome in found)
    # An epoch has four batches.
    assert [a == b for a, b in zip(one, other, strict=True)] == [*[False] * 4, True] * 2
    assert len({*one}) == 10
