"""Verified resumes: unknown state is found by the next first step; an honest one never."""

import contextvars
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.training.checkpoint import fault_hooks, next_step
from parsl_freetrain.training.loop import unknown_state
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.bit_sums import bit_sums
from tests.support.ranks import order, ranks

BATCH, TOTAL, STOP = 8, 96, 40
X = torch.linspace(-1, 1, 4 * 24).reshape(24, 4)
Plant = Callable[[FragmentContext, Any, Any], Any]


def nothing(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    return lambda x: model(x).pow(2).mean()


def a_list(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    strength: list[float] = [1.0]
    ctx.after_step(lambda: strength.append(0.9 * strength[-1]))
    return lambda x: model(x + strength[-1]).pow(2).mean()


def a_queue_of_its_own(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    strengths = queue.Queue[float]()
    strengths.put(1.0)
    ctx.after_step(lambda: strengths.put(0.8 * strengths.get()))
    return lambda x: model(x).pow(2).mean() * strengths.queue[0]


def a_schedule_of_its_own(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    """What is set in the body for the next step, as by a count that begins anew."""

    def loss_of(x: Any) -> Any:
        optimizer.param_groups[0]['next_lr'] = float(ctx.fragment)
        return model(x).pow(2).mean()

    return loss_of


def falls(model: Any, get: Callable[[], float], put: Callable[[float], Any]) -> Any:
    def loss_of(x: Any) -> Any:
        put(0.8 * (strength := get()))
        return model(x).pow(2).mean() * strength

    return loss_of


def in_the_environment(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    put = partial(os.environ.__setitem__, 'STRENGTH')
    return falls(model, lambda: float(os.environ.get('STRENGTH', '1')), lambda one: put(str(one)))


def in_a_queue(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    strengths = queue.Queue[float]()
    strengths.put(1.0)
    return falls(model, strengths.get, strengths.put)


def in_a_thread(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    here = threading.local()
    vars(here)['strength'] = 1.0
    return falls(model, lambda: here.strength, partial(setattr, here, 'strength'))


def in_a_context(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    strength = contextvars.ContextVar('strength', default=1.0)
    return falls(model, strength.get, strength.set)


def in_a_cache(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    size = lru_cache(lambda: complex(model[0].weight.detach().norm()))  # plain ones are refused
    return lambda x: model(x).pow(2).mean() + (model[0].weight.norm() - size().real).pow(2)


def in_a_number(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
    size = float(model[0].weight.detach().norm())
    return lambda x: model(x).pow(2).mean() + (model[0].weight.norm() - size).pow(2)


def train(ctx: FragmentContext, plant: Plant, stop: bool, in_epochs: bool) -> None:
    """The first fragment stops behind ``STOP`` samples, or dies as soon as it has saved there."""
    from parsl_freetrain.training.comm import peers
    from parsl_freetrain.training.loop import save_timing

    save_timing.AHEAD_S = 30.0  # a step may take as long on a busy computer
    peers.EVERY_S = 0.0  # ranks agree after each other step
    torch.manual_seed(1)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    model, optimizer = ctx.prepare(model, optimizer)
    loss_of, data = plant(ctx, model, optimizer), TensorDataset(X)
    at = 2 * BATCH if in_epochs else STOP
    for _ in ctx.epochs() if in_epochs else '1':
        for (x,) in ctx.loop(data, BATCH):
            run = ctx._run
            if ctx.samples == at and ctx.fragment == 1:
                run.parts.inbox._stop = stop
                run.checkpointer.timing.want_soon()
                if not stop:  # so long, a checkpoint waits for the next step
                    run.checkpointer.timing.step_took(30.0)
            if ctx.samples == at + BATCH and ctx.fragment == 1 and not stop:
                fault_hooks.on_saving.append(lambda at: os._exit(1) if at == 'committed' else None)
                time.sleep(0.3)  # else it would be committed by now
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
            ctx.report(loss=loss.item())


def cut(
    fork_server: ForkClient,
    folder: Path,
    plant: Plant,
    stop: bool = True,
    counts: tuple[int, int] = (1, 2),
    between: Callable[[int], None] = lambda samples: None,
    in_epochs: bool = False,
    **changes: Any,
) -> tuple[Any, str, Any]:
    """The last outcome of a second fragment, what it printed, and its newest checkpoint."""
    changes = {'total_samples': TOTAL, **changes}
    first = order(folder, **changes)
    for fragment, count in enumerate(counts, 1):
        ordered = replace(first, fragment=fragment)
        with ranks(fork_server, ordered, count, folder, train, plant, stop, in_epochs) as gang:
            outcome, log = gang.run()[0], gang.ranks[0].log.read_text()
            saved = gang.ranks[0].said(ev.CheckpointSaved)
        if fragment == 1:
            between(getattr(outcome, 'samples', 0))
    return outcome, log, saved[-1].checkpoint if saved else None


@pytest.mark.parametrize('stop', [True, False], ids=['stopped', 'killed'])
def test_state_that_the_context_does_not_know_ends_the_next_fragment(
    fork_server: ForkClient, tmp_path: Path, stop: bool
) -> None:
    outcome, _, saved = cut(fork_server, tmp_path, a_queue_of_its_own, stop)
    assert (outcome.how, saved) == ('error', None)
    assert (outcome.error.type, outcome.error.final) == ('BadInput', True)
    assert 'fragment 2 does not continue what fragment 1 began: after ' in outcome.error.message
    assert "the gradient of parameter '0.weight' (and " in outcome.error.message
    assert 'strengths (of Queue, whose content is lost)' in outcome.error.message


@pytest.mark.parametrize(
    ('mode', 'stop', 'counts'),
    [
        ('reproducible', True, (1, 2)),
        ('reproducible', False, (1, 2)),
        ('throughput', True, (1, 2)),
        ('throughput', False, (1, 1)),
        ('throughput', True, (3, 3)),
        ('throughput', False, (2, 2)),
        ('scaled', False, (1, 1)),
    ],
)
def test_an_honest_training_is_verified(
    fork_server: ForkClient, tmp_path: Path, mode: str, stop: bool, counts: tuple[int, int]
) -> None:
    outcome, log, saved = cut(fork_server, tmp_path, a_list, stop, counts, mode=mode)
    assert outcome.how == 'finished', log
    assert (saved.resumes, saved.verified) == (1, 1)
    assert 'Not verified' not in log


def test_a_stop_with_the_first_epoch(fork_server: ForkClient, tmp_path: Path) -> None:
    outcome, log, saved = cut(fork_server, tmp_path, a_list, in_epochs=True)
    assert (outcome.how, saved.resumes, saved.verified) == ('finished', 1, 1), log
    outcome, _, saved = cut(fork_server, tmp_path / 'lost', a_queue_of_its_own, in_epochs=True)
    assert saved is None and 'after 24 samples' in outcome.error.message


@pytest.mark.parametrize(
    ('plant', 'stop', 'says'),
    [
        (in_the_environment, True, 'os.environ'),
        (in_a_queue, True, '(of Queue, whose content is lost)'),
        (in_a_thread, False, 'here (of _local, whose'),
        (in_a_context, False, '(of ContextVar, whose'),
        (in_a_cache, True, 'size (of _lru_cache_wrapper, whose'),
        (in_a_number, False, 'Before the loop, size was '),
    ],
)
def test_what_is_lost_in_throughput_mode_is_a_warning(
    fork_server: ForkClient, tmp_path: Path, plant: Plant, stop: bool, says: str
) -> None:
    counts = (2, 2) if plant is in_a_queue else (1, 1)
    outcome, log, saved = cut(fork_server, tmp_path, plant, stop, counts, mode='throughput')
    assert (outcome.how, saved.resumes, saved.verified) == ('finished', 1, 0), log
    assert 'the loss of the next step is ' in log
    assert says in log


def test_a_long_step_is_not_computed_ahead(fork_server: ForkClient, tmp_path: Path) -> None:
    def slow(ctx: FragmentContext, model: Any, optimizer: Any) -> Any:
        timing = ctx._run.checkpointer.timing
        plain = timing.step_took
        timing.step_took = lambda seconds: plain(60.0)  # type: ignore[method-assign]
        return nothing(ctx, model, optimizer)

    outcome, log, saved = cut(fork_server, tmp_path, slow)
    assert (outcome.how, saved.resumes, saved.verified) == ('finished', 1, 0)
    assert 'Not verified: the step after 48 samples was not computed before.' in log


def test_settings_for_the_next_step_count(fork_server: ForkClient, tmp_path: Path) -> None:
    outcome, _, _ = cut(fork_server, tmp_path, a_schedule_of_its_own)
    assert 'the step gives the settings of optimizer 1 (learning' in outcome.error.message


def test_a_difference_may_be_a_warning(fork_server: ForkClient, tmp_path: Path) -> None:
    outcome, log, saved = cut(fork_server, tmp_path, a_queue_of_its_own, on_difference='warn')
    assert (outcome.how, saved.resumes, saved.verified) == ('finished', 1, 0)
    assert 'strengths (of Queue, whose content is lost)' in log


@pytest.mark.parametrize('mode', ['reproducible', 'throughput'])
@pytest.mark.parametrize(
    ('spoil', 'says'),
    [
        ({'state': {"parameter '0.bias'": 1}}, "parameter '0.bias' had another value before"),
        ({'batch': 1}, 'the next global batch has other samples'),
        ({'device': 'another'}, ''),
    ],
)
def test_state_samples_and_device_are_compared_in_each_mode(
    fork_server: ForkClient, tmp_path: Path, mode: str, spoil: dict[str, Any], says: str
) -> None:
    """Of another device, a difference is no more than a warning."""
    plant = nothing if says or mode == 'throughput' else a_queue_of_its_own

    def spoilt(samples: int) -> None:
        kept = next_step.read(tmp_path / 'store', samples, 1)
        assert kept is not None
        given = {**spoil, 'state': {**kept.state, **spoil.get('state', {})}}
        next_step.write(tmp_path / 'store', samples, 1, msgspec.structs.replace(kept, **given))

    outcome, log, _ = cut(fork_server, tmp_path, plant, True, (1, 1), spoilt, mode=mode)
    if says:
        assert says in outcome.error.message
    else:
        assert outcome.how == 'finished'
        assert (', and before on another. ' in log) == (plant is not nothing)


def test_equal_tensors_have_equal_sums_however_they_lie() -> None:
    tensors = [
        torch.randn(5, 3),
        torch.randn(300, 301).t(),
        torch.tensor(-3),
        torch.zeros(0),
        torch.randn(7).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor([-0.0, 1.0]),
    ]
    other = [tensor.contiguous().clone() for tensor in tensors[:-1]] + [torch.tensor([0.0, 1.0])]
    device = torch.device('cpu')
    assert bit_sums([*tensors, None], device).tolist() == bit_sums([*other, None], device).tolist()
    for i, tensor in enumerate(other):
        if tensor.numel() and tensor.dtype is not torch.bool:
            tensor.view(-1)[-1] += 1
            assert bit_sums(other, device)[i] != bit_sums(tensors, device)[i]


def test_variables_are_searched_for_state() -> None:
    model, known = nn.Linear(1, 1), nn.Linear(1, 1)
    names: dict[str, Any] = {
        'rows': [1, nn.Parameter(torch.zeros(1))],
        'turns': [1],
        'constant': [2],
        'known': known,
        'box': SimpleNamespace(inner=torch.optim.SGD(model.parameters(), lr=1.0)),
        'lazy': (i for i in range(3)),
        'loss': nn.MSELoss(),
        'rng': random.Random(1),  # those are seeded
        'text': 'none',
        'numpy': np,
    }
    before = {name: unknown_state.mark_of(one) for name, one in names.items()}
    names['turns'].append(2)
    names['batch'] = torch.zeros(1)  # since then
    assert list(unknown_state.unknown(names, [known], before).items()) == [
        ('box.inner', 'an optimizer, SGD'),
        ('rows[1]', 'a tensor that is trained'),
        ('lazy', 'an iterator, generator'),
        ('turns', 'a list that changes'),
    ]
