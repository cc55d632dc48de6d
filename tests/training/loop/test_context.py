"""What users do wrong in their function gets a sentence; what they may do works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks

DATA = TensorDataset(torch.arange(16.0).reshape(8, 2))


def made(ctx: FragmentContext, width: int = 1) -> tuple[Any, Any]:
    model = nn.Linear(2, width)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer


def fit(ctx: FragmentContext, batch_size: int = 4, data: Any = DATA, width: int = 1) -> None:
    model, optimizer = made(ctx, width)
    for (x,) in ctx.loop(data, batch_size):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


def prepares_twice(ctx: FragmentContext) -> None:
    made(ctx)
    made(ctx)


def prepares_a_number(ctx: FragmentContext) -> None:
    ctx.prepare(3)


def prepares_no_optimizer(ctx: FragmentContext) -> None:
    ctx.prepare(nn.Linear(2, 1))


def loops_unprepared(ctx: FragmentContext) -> None:
    for _ in ctx.loop(DATA, 4):
        pass


def loops_too_often(ctx: FragmentContext) -> None:
    fit(ctx)
    ctx.loop(DATA, 4)


def loops_within_a_loop(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.loop(DATA, 4, samples=8):
        ctx.loop(DATA, 4)


def never_steps(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.loop(DATA, 4):
        pass


def never_loops(ctx: FragmentContext) -> None:
    made(ctx)


def breaks(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        model(x).mean().backward()
        optimizer.step()
        if ctx.samples:
            break


def steps_twice(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        model(x).mean().backward()
        optimizer.step()
        optimizer.step()


def steps_outside(ctx: FragmentContext) -> None:
    _, optimizer = made(ctx)
    optimizer.step()


def forgets_to_step(ctx: FragmentContext) -> None:
    model, _ = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        model(x).mean().backward()


def forgets_a_scheduler(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ctx.prepare(model, optimizer)
    ctx.loop(DATA, 4)


def has_a_generator(ctx: FragmentContext) -> None:
    fit(ctx, data=(x for x in [1, 2]))


def has_sparse_gradients(ctx: FragmentContext) -> None:
    model = nn.Embedding(20, 1, sparse=True)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(DATA, 4):
        model(x.long()).mean().backward()
        optimizer.step()


def has_an_optimizer_that_needs_a_closure(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    ctx.prepare(model, torch.optim.LBFGS(model.parameters()))


def is_divided_already(ctx: FragmentContext) -> None:
    from torch.distributed.tensor import distribute_module

    model = distribute_module(nn.Linear(2, 1), ctx.mesh['data'])
    ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def keeps_an_object(ctx: FragmentContext) -> None:
    ctx.state['thing'] = object()
    fit(ctx)


def keeps_a_list(ctx: FragmentContext) -> None:
    ctx.state = [1, 2]  # type: ignore[assignment]


def empty_batch(ctx: FragmentContext) -> None:
    fit(ctx, batch_size=0)


def run(
    fork_server: ForkClient,
    folder: Path,
    function: Callable[..., None],
    *args: Any,
    fragment: int = 1,
    world_size: int = 1,
    **options: Any,
) -> list[Any]:
    ordered = order(folder, fragment, **{'total_samples': 16, **options})
    with ranks(fork_server, ordered, world_size, folder, function, *args) as gang:
        return gang.run()


@pytest.mark.parametrize(
    ('function', 'sentence'),
    [
        (prepares_twice, 'ctx.prepare was called twice'),
        (prepares_a_number, 'was given a int'),
        (prepares_no_optimizer, '0 optimizers'),
        (is_divided_already, "Parameter 'weight' of model 1 of ctx.prepare is a DTensor"),
        (has_an_optimizer_that_needs_a_closure, 'was given LBFGS, which computes the loss several'),
        (loops_unprepared, 'before ctx.prepare'),
        (loops_too_often, 'write that as for epoch in ctx.epochs()'),
        (loops_within_a_loop, 'left ctx.loop after 0 of 16 samples'),
        (never_steps, 'ended without a single optimizer.step()'),
        (never_loops, 'returned without ctx.loop'),
        (breaks, 'left ctx.loop after 4 of 16 samples'),
        (steps_twice, 'called twice in one iteration'),
        (steps_outside, 'outside of ctx.loop'),
        (forgets_to_step, 'call optimizer.step() once in every iteration'),
        (forgets_a_scheduler, 'not given to ctx.prepare'),
        (has_a_generator, 'was given a generator, which can be read only once'),
        (has_sparse_gradients, 'sparse'),
        (keeps_an_object, 'ctx.state cannot be saved'),
        (keeps_a_list, 'ctx.state was set to [1, 2]; it is a dict'),
        (empty_batch, 'batch size is 0'),
    ],
)
def test_a_mistake_gets_a_sentence(
    fork_server: ForkClient, tmp_path: Path, function: Callable[..., None], sentence: str
) -> None:
    (outcome,) = run(fork_server, tmp_path, function)
    assert (outcome.how, outcome.error.type) == ('error', 'BadInput'), outcome.error.traceback
    assert sentence in outcome.error.message
    assert '\n' not in outcome.error.message


@pytest.mark.parametrize('value', ['small', 10**400], ids=['text', 'beyond float'])
def test_reporting_something_else_than_a_number(
    fork_server: ForkClient, tmp_path: Path, value: Any
) -> None:
    def report(ctx: FragmentContext) -> None:
        ctx.report(loss=value)

    (outcome,) = run(fork_server, tmp_path, report)
    assert outcome.error.type == 'TypeError'
    assert f'loss={value!r}' in outcome.error.message


@pytest.mark.parametrize(
    ('options', 'args', 'sentence'),
    [
        ({}, (4, DATA, 3), 'weight has shape (1, 2) there and (3, 2) here'),
        ({}, (8,), 'the batch size has changed from 4 to 8'),
        ({}, (4, TensorDataset(torch.zeros(9, 2))), "the dataset's length has changed from 8 to 9"),
        ({'shards': 5}, (4,), 'shards (0: throughput mode) has changed from 4 to 5'),
        ({'seed': 1}, (4,), 'the seed has changed from 7 to 1'),
    ],
)
def test_what_must_not_change_between_fragments(
    fork_server: ForkClient,
    tmp_path: Path,
    options: dict[str, Any],
    args: tuple[Any, ...],
    sentence: str,
) -> None:
    assert run(fork_server, tmp_path, fit)[0].how == 'finished'
    (outcome,) = run(fork_server, tmp_path, fit, *args, fragment=2, total_samples=32, **options)
    assert outcome.how == 'error'
    assert sentence in outcome.error.message
    assert str(tmp_path) in outcome.error.message


def test_more_can_be_trained_later(fork_server: ForkClient, tmp_path: Path) -> None:
    run(fork_server, tmp_path, fit)
    assert run(fork_server, tmp_path, fit, fragment=2, total_samples=32)[0].samples == 32


def test_what_the_context_says(fork_server: ForkClient, tmp_path: Path) -> None:
    def look(ctx: FragmentContext) -> None:
        model, optimizer = made(ctx)
        assert (ctx.trainer, ctx.fragment, ctx.nodes, ctx.world_size, ctx.is_main) == (
            'digits',
            1,
            1,
            2,
            ctx.rank == 0,
        )
        assert ctx.samples == 0
        assert ctx.total_samples == 16
        assert 0 < ctx.time_left() < 3600
        assert not ctx.should_stop()
        said = []
        for (x,) in ctx.loop(DATA, 5):
            said.append((ctx.samples, ctx.epoch))
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        assert sorted(set(said)) == [(0, 0), (5, 0), (8, 1), (13, 1)], said
        assert ctx.samples == 16

    import time

    outcomes = run(fork_server, tmp_path, look, world_size=2, deadline=time.monotonic() + 3000)
    assert [outcome.how for outcome in outcomes] == ['finished', 'finished'], outcomes


def test_rank_0_decides_whether_all_is_saved(fork_server: ForkClient, tmp_path: Path) -> None:
    def fails_behind_the_loop(ctx: FragmentContext) -> None:
        fit(ctx)
        if ctx.is_main:
            raise OSError('no evaluation')

    outcomes = run(fork_server, tmp_path, fails_behind_the_loop, world_size=2)
    assert [outcome.how for outcome in outcomes] == ['error', 'peer-lost']
    assert outcomes[0].path is None  # all of it took less than a second


def test_swallowing_the_end_changes_nothing(fork_server: ForkClient, tmp_path: Path) -> None:
    def swallows(ctx: FragmentContext) -> None:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGUSR1)
        with contextlib.suppress(BaseException):
            fit(ctx)

    (outcome,) = run(fork_server, tmp_path, swallows)
    assert (outcome.how, outcome.samples, outcome.error) == ('stopped', 4, None)


def test_two_models_and_frozen_and_unused_parameters(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    def train(ctx: FragmentContext) -> None:
        torch.manual_seed(0)
        body, head, spare = nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1)
        first = torch.optim.Adam([*body.parameters(), *spare.parameters()], lr=0.1)
        second = torch.optim.AdamW(head.parameters(), lr=0.1)
        model = nn.ModuleList([body, spare])
        model, head, first, second = ctx.prepare(model, head, first, second)
        for (x,) in ctx.loop(DATA, 3):
            body.bias.requires_grad_(ctx.epoch > 0)
            first.zero_grad()
            second.zero_grad()
            head(model[0](x)).pow(2).mean().backward()
            first.step()
            second.step()
        assert spare.weight.grad is None

    states = []
    for world_size, folder in ((1, tmp_path / 'one'), (3, tmp_path / 'three')):
        outcomes = run(fork_server, folder, train, world_size=world_size)
        assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
        states.append(load_weights(outcomes[0].path))
    assert {name.split('.')[0] for name in states[0]} == {'model', 'model_2'}
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_gradient_scaler_scales_and_is_saved(fork_server: ForkClient, tmp_path: Path) -> None:
    def train(ctx: FragmentContext) -> None:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model, optimizer, scaler = ctx.prepare(
            model, optimizer, torch.amp.GradScaler('cpu', init_scale=1024.0, growth_interval=3)
        )
        for (x,) in ctx.loop(DATA, 4):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            scaler.scale(loss * (float('inf') if ctx.samples == 8 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
        # An infinite gradient is the scaler's business: it leaves out the step and halves the
        # scale.
        assert scaler.get_scale() == {1: 512.0, 2: 1024.0}[ctx.fragment], scaler.get_scale()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())

    for fragment, total in ((1, 16), (2, 24)):
        outcomes = run(
            fork_server,
            tmp_path,
            train,
            mode='throughput',
            world_size=2,
            fragment=fragment,
            total_samples=total,
        )
        assert [outcome.how for outcome in outcomes] == ['finished'] * 2, outcomes
        assert 'skipped_steps' not in outcomes[0].metrics


@pytest.mark.parametrize('mode', ['reproducible', 'throughput', 'scaled'])
def test_a_learning_rate_by_samples(fork_server: ForkClient, tmp_path: Path, mode: str) -> None:
    def train(ctx: FragmentContext) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
        scheduler = ctx.samples_lr(optimizer, lambda samples: 1 - samples / 32)
        model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
        for (x,) in ctx.loop(DATA, 4):
            assert optimizer.param_groups[0]['lr'] == 2 * (1 - ctx.samples / 32), (
                ctx.samples,
                optimizer.param_groups,
            )
            optimizer.zero_grad()
            model(x).mul(0).mean().backward()
            optimizer.step()
            scheduler.step()

    for fragment, (world_size, total) in enumerate(((1, 8), (2, 16), (1, 28)), 1):
        outcomes = run(
            fork_server,
            tmp_path,
            train,
            mode=mode,
            world_size=world_size,
            fragment=fragment,
            total_samples=total,
        )
        assert [outcome.how for outcome in outcomes] == ['finished'] * world_size, outcomes
