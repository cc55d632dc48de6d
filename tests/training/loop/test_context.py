"""What users do wrong in their function gets a sentence; what they may do works."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import made, step
from tests.support.examples import in_this_process, refused_here
from tests.support.ranks import in_ranks

DATA = TensorDataset(torch.arange(16.0).reshape(8, 2))


def fit(
    ctx: FragmentContext,
    batch_size: int = 4,
    data: Any = DATA,
    width: int = 1,
    steps: int = 1,
    leaves: bool = False,
) -> None:
    model, optimizer = made(ctx, outputs=width)
    for (x,) in ctx.loop(data, batch_size):
        optimizer.zero_grad()
        model(x).mean().backward()
        for _ in range(steps):
            optimizer.step()
        if leaves and ctx.samples:
            break


def loops_too_often(ctx: FragmentContext) -> None:
    fit(ctx)
    ctx.loop(DATA, 4)


def loops_by_range(ctx: FragmentContext) -> None:
    batches, (model, optimizer) = ctx.loop, made(ctx)
    for _ in range(4):
        for (x,) in batches(DATA, 4):
            step(model, optimizer, x)


def counts_by_range(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    batches = iter(ctx.loop(DATA, 4))
    for _ in range(4):
        step(model, optimizer, next(batches)[0])


def loops_within_a_loop(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.loop(DATA, 4, samples=8):
        ctx.loop(DATA, 4)


def never_steps(ctx: FragmentContext) -> None:
    made(ctx)
    for _ in ctx.loop(DATA, 4):
        pass


def forgets_a_scheduler(ctx: FragmentContext) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ctx.prepare(model, optimizer)
    ctx.loop(DATA, 4)


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


run = partial(in_ranks, total_samples=16)


MISTAKES: dict[str, Callable[[Any], object]] = {
    'ctx.prepare was called twice': lambda ctx: (made(ctx), made(ctx)),
    'was given a int': lambda ctx: ctx.prepare(3),
    'was given no torch.optim.Optimizer': lambda ctx: ctx.prepare(nn.Linear(2, 1)),
    'was given LBFGS, which computes the loss several': has_an_optimizer_that_needs_a_closure,
    'before ctx.prepare': lambda ctx: ctx.loop(DATA, 4),
    'was to train 0 samples, but 0 of the total of 16 are left': loops_too_often,
    'within a for loop of loops_by_range, and goes over all epochs': loops_by_range,
    'within a for loop of counts_by_range, and goes over all epochs': counts_by_range,
    'left ctx.loop after 0 of 16 samples, or called it again': loops_within_a_loop,
    'ended without a single optimizer.step()': never_steps,
    'returned without ctx.loop': lambda ctx: made(ctx) and None,
    'left ctx.loop after 4 of 16 samples': lambda ctx: fit(ctx, leaves=True),
    'called twice in one iteration': lambda ctx: fit(ctx, steps=2),
    'outside of ctx.loop': lambda ctx: made(ctx)[1].step(),
    'call optimizer.step() once in every iteration': lambda ctx: fit(ctx, steps=0),
    'not given to ctx.prepare': forgets_a_scheduler,
    'was given a generator, which can be read only once': lambda ctx: fit(
        ctx, data=(x for x in [1, 2])
    ),
    'sparse': has_sparse_gradients,
    'ctx.state cannot be saved': keeps_an_object,
    'ctx.state was set to [1, 2]; it is a dict': keeps_a_list,
    'batch size is 0': lambda ctx: fit(ctx, batch_size=0),
}


@pytest.mark.parametrize('sentence', MISTAKES)
def test_a_mistake_gets_a_sentence(sentence: str) -> None:
    assert sentence in refused_here(MISTAKES[sentence], total_samples=16)


def test_what_counts_steps_itself_may_leave_in_the_last_one() -> None:
    def train(ctx: FragmentContext) -> None:
        (model, optimizer), batches, done = made(ctx), iter(ctx.loop(DATA, 4)), 0
        while done < 4:
            step(model, optimizer, next(batches)[0])
            done += 1

    assert in_this_process(train, total_samples=16, shards=1)[0].samples == 16


def test_what_needs_ranks_gets_a_sentence(fork_server: ForkClient, tmp_path: Path) -> None:
    """A model that is divided; a metric that is no number keeps its own type of error."""

    def reports(ctx: FragmentContext, value: Any) -> None:
        ctx.report(loss=value)

    (outcome,) = run(fork_server, tmp_path, is_divided_already)
    assert (outcome.how, outcome.error.type) == ('error', 'BadInput'), outcome.error.traceback
    assert "Parameter 'weight' of model 1 of ctx.prepare is a DTensor" in outcome.error.message
    for value in ('small', 10**400):
        (outcome,) = run(fork_server, tmp_path, reports, value)
        assert outcome.error.type == 'TypeError'
        assert f'loss={value!r}' in outcome.error.message


def test_what_must_not_change_between_fragments(fork_server: ForkClient, tmp_path: Path) -> None:
    assert run(fork_server, tmp_path, fit)[0].how == 'finished'
    changes: list[tuple[dict[str, Any], tuple[Any, ...], str]] = [
        ({}, (4, DATA, 3), 'weight has shape (1, 2) there and (3, 2) here'),
        ({}, (8,), 'the batch size has changed from 4 to 8'),
        ({}, (4, TensorDataset(torch.zeros(9, 2))), "the dataset's length has changed from 8 to 9"),
        ({'shards': 5}, (4,), 'shards (0: throughput mode) has changed from 4 to 5'),
        ({'seed': 1}, (4,), 'the seed has changed from 7 to 1'),
    ]
    for fragment, (options, args, sentence) in enumerate(changes, 2):
        how: dict[str, Any] = {'fragment': fragment, 'total_samples': 32, **options}
        (outcome,) = run(fork_server, tmp_path, fit, *args, **how)
        assert outcome.how == 'error'
        assert sentence in outcome.error.message
        assert str(tmp_path) in outcome.error.message


def test_what_the_context_says(fork_server: ForkClient, tmp_path: Path) -> None:
    def look(ctx: FragmentContext) -> None:
        model, optimizer = made(ctx)
        assert (ctx.trainer, ctx.fragment, ctx.nodes, ctx.world_size) == ('digits', 1, 1, 2)
        assert ctx.is_main is (ctx.rank == 0)
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
