"""How a training ends: at its total, early, after several loops, killed behind the loop, again."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, same_weights
from parsl_freetrain.core.model.events import CheckpointSaved, FragmentProgressed
from parsl_freetrain.training.loop.rank import _described
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, made, step, trained
from tests.support.examples import refused_here
from tests.support.ranks import KILLED, order, ranks

DATA = TensorDataset(torch.arange(32.0).reshape(16, 2) / 32)
MORE = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24)


def as_documented(ctx: FragmentContext, killed_in: int = 0) -> None:
    """Uses a variable of the loop behind it, as scripts do."""
    import time

    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        loss = step(model, optimizer, x)
        if ctx.samples == 24 and ctx.fragment == 1:
            time.sleep(1.2)  # long enough for a checkpoint before the last batch
    if ctx.fragment <= killed_in:
        ctx._run.checkpointer.settled()
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.report(last=loss)


def run(
    fork_server: ForkClient,
    folder: Path,
    function: Callable[..., Any],
    *args: Any,
    fragment: int = 1,
    world_size: int = 1,
    **options: Any,
) -> tuple[list[Any], Any]:
    ordered = order(folder, fragment, **{'total_samples': 32, **options})
    with ranks(fork_server, ordered, world_size, folder, function, *args) as gang:
        return gang.run(), gang.ranks[0]


def returns_values(ctx: FragmentContext) -> dict[str, Any]:
    as_documented(ctx)
    return {'accuracy': torch.tensor(0.5), 'names': ['a', 'b'], 'rank': ctx.rank}


def returns_a_model(ctx: FragmentContext) -> nn.Module:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        step(model, optimizer, x)
    return model  # type: ignore[no-any-return]


def test_what_torch_says_of_devices_names_what_to_move() -> None:
    """Here is one device, so with torch's own words."""
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError('Expected all tensors to be on the same device, but found ...')
    said = _described(raised.value)
    assert said.message.endswith('needs .to(ctx.device).')
    assert 'needs .to(ctx.device).' in cloudpickle.loads(said.exception or b'')[0].__notes__[0]


class Wordless(Exception):
    def __str__(self) -> str:
        raise LookupError


def test_an_exception_whose_text_cannot_be_told() -> None:
    """It ended the rank, five times, and the trainer with "exited with status 1"."""
    said = _described(Wordless())
    assert said.type == 'Wordless' and 'LookupError' in said.message and said.exception is None


def test_the_same_script_twice(fork_server: ForkClient, tmp_path: Path) -> None:
    """What has been trained stays so, as what was returned and reported; nothing is done again."""
    before, rank = run(fork_server, tmp_path, returns_values, world_size=2)
    assert before[0].metrics.keys() == {'last'}, before[0].error
    assert rank.said(FragmentProgressed)[-1].metrics == before[0].metrics  # which is recorded
    again, rank = run(fork_server, tmp_path, returns_values, fragment=2, world_size=2)
    assert [outcome.how for outcome in (*before, *again)] == ['finished'] * 4
    for outcome in (before[0], again[0]):
        assert json.loads(outcome.result) == {'accuracy': 0.5, 'names': ['a', 'b'], 'rank': 0}
        assert (outcome.samples, outcome.path) == (32, before[0].path)
        assert outcome.metrics == before[0].metrics
    assert not rank.said(CheckpointSaved)
    said = refused_here(returns_a_model, total_samples=32)
    assert 'The function returned a Linear that cannot be kept' in said


def test_a_kill_behind_the_loop_repeats_one_batch(fork_server: ForkClient, tmp_path: Path) -> None:
    (undisturbed,), _ = run(fork_server, tmp_path / 'one', as_documented)
    outcomes, rank = run(fork_server, tmp_path / 'cut', as_documented, 1)
    assert outcomes == [KILLED]
    assert [saved.checkpoint.samples for saved in rank.said(CheckpointSaved)] == [28]
    (outcome,), _ = run(fork_server, tmp_path / 'cut', as_documented, 1, fragment=2)
    assert outcome.how == 'finished', outcome.error
    assert outcome.metrics == undisturbed.metrics
    assert same_weights(undisturbed.path, outcome.path)


def ends_in_the_body(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4):
        step(model, optimizer, x)
        if ctx.samples == 8 and ctx.rank == ctx.world_size - 1:
            ctx.finish_early('good enough')
    ctx.report(behind=1.0)


def ends_after_a_step(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)

    def after() -> None:
        if ctx.samples == 8:
            ctx.finish_early('good enough')

    ctx.after_step(after)
    for (x,) in ctx.loop(DATA, 4):
        step(model, optimizer, x)


def ends_at_an_epoch(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    ctx.each_epoch(lambda: ctx.finish_early('good enough') if ctx.is_main else None)
    for (x,) in ctx.loop(DATA, 4):
        step(model, optimizer, x)


@pytest.mark.parametrize(
    ('function', 'samples', 'count'),
    [(ends_in_the_body, 12, 3), (ends_after_a_step, 12, 2), (ends_at_an_epoch, 16, 2)],
)
def test_an_early_end_is_an_end(
    fork_server: ForkClient, tmp_path: Path, function: Any, samples: int, count: int
) -> None:
    """At the same batch for all ranks; the next run does not train on."""
    outcomes, rank = run(fork_server, tmp_path, function, world_size=count)
    assert {(outcome.how, outcome.samples) for outcome in outcomes} == {('finished', samples)}
    assert 'Finished early' in rank.log.read_text()
    outcomes, _ = run(fork_server, tmp_path, function, fragment=2, world_size=count - 1)
    assert {(outcome.how, outcome.samples) for outcome in outcomes} == {('finished', samples)}


def phases(ctx: FragmentContext, stop_at: int) -> None:
    """Two rounds on two datasets; frozen in the second loop."""
    model, optimizer = made(ctx)
    seen = ctx.state.setdefault('seen', [])
    ctx.after_step(lambda: seen.append(ctx.samples))
    for turn in range(2):
        model.bias.requires_grad_(True)
        for (x,) in ctx.loop(DATA, 4, samples=16):
            cut(ctx, stop_at)
            step(model, optimizer, x)
        assert ctx.samples >= 16 + 28 * turn
        model.bias.requires_grad_(False)
        for (x,) in ctx.loop(MORE, 6, epochs=1):
            cut(ctx, stop_at)
            step(model, optimizer, x)


def test_of_loops_the_right_one_goes_on(fork_server: ForkClient, tmp_path: Path) -> None:
    paths = []
    for stop_at, sizes in ((0, [1]), (16, [2, 1]), (22, [2, 1]), (44, [2, 1])):
        folder = tmp_path / str(stop_at)
        outcome = trained(fork_server, folder, sizes, phases, stop_at, total_samples=56)
        assert outcome.samples == 56
        paths.append(outcome.path)
    assert all(same_weights(paths[0], other) for other in paths[1:])


def epochs_of_two_loops(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4, epochs=2):
        step(model, optimizer, x)
    for (x,) in ctx.loop(MORE, 4):
        step(model, optimizer, x)


def too_many_epochs(ctx: FragmentContext) -> None:
    made(ctx)
    ctx.loop(DATA, 4, epochs=4)


def too_few_samples(ctx: FragmentContext) -> None:
    model, optimizer = made(ctx)
    for (x,) in ctx.loop(DATA, 4, epochs=2):
        step(model, optimizer, x)


def test_totals_of_several_loops(fork_server: ForkClient, tmp_path: Path) -> None:
    (outcome,), _ = run(fork_server, tmp_path / '1', epochs_of_two_loops, total_epochs=3)
    assert (outcome.how, outcome.samples) == ('finished', 2 * 16 + 12), outcome.error
    said = refused_here(too_many_epochs, total_epochs=3)
    assert 'was given 4 epochs, but only 3 of the total of 3 are left' in said
    said = refused_here(too_few_samples, total_epochs=3)
    assert 'left ctx.loop after 32 of 48 samples' in said
