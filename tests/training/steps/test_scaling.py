"""Gradient scalers skip steps and change scales as in a plain loop, whatever sees the batch."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from parsl_freetrain import Throughput
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import refused_here
from tests.support.ranks import all_finish, order

TOTAL, BATCH, CUT = 96, 8, 40
DATA = torch.randn(TOTAL, 5, generator=torch.Generator().manual_seed(5))
DATA[:, 4] = 1
DATA[[9, 33, 34, 70], 4] = float('inf')  # a sample's weight in the loss


def train(ctx: Any, scalers: int = 1, clip: Any = None, does: Any = None, **loop: Any) -> Any:
    """Two networks, one with a fused optimizer, each with a parameter beside it, whose gradient
    becomes infinite; the second one's only if gradients are clipped.
    """
    torch.manual_seed(1)
    models: list[Any] = [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 4), nn.Tanh())]
    beside = [nn.Parameter(torch.ones(2)) for _ in models]
    parameters = [p for i in (0, 1) for p in (beside[i], *models[i].parameters())]
    steps: list[Any] = [optim.Adam(parameters[:3], lr=0.01, fused=True)]
    steps.append(optim.SGD(parameters[3:], lr=0.1, momentum=0.9))
    own = [torch.amp.GradScaler('cpu', 2.0**10, growth_interval=3) for _ in range(scalers)]
    batches: Any = DATA.split(BATCH)
    if ctx is not None:
        given = ctx.prepare(*models, *steps, *own[does == 'forget' :], clip_grad_norm=clip)
        models, steps = given[:2], given[2:4]
        batches = ctx.loop(DATA, BATCH, shuffle=False, **loop)
    for x in batches:
        for i, (optimizer, scaler) in enumerate(zip(steps, (own[0], own[-1]), strict=True)):
            optimizer.zero_grad()
            weight = x[:, 4] if i == 0 or clip is not None else 1
            loss = models[i](x[:, :4]).pow(2).mean(1) + beside[i].pow(2).sum() * weight
            scaler.scale(loss.mean()).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
        if clip is not None and ctx is None:
            nn.utils.clip_grad_norm_(parameters, clip)
        own[0].step(steps[0])
        own[-1].step(steps[1])
        for scaler in own:
            scaler.update()
        if callable(does):
            does(own[0])
    return [one.state_dict() for one in own], [p.detach().flatten().tolist() for p in parameters]


@pytest.mark.parametrize(
    ('how', 'scalers', 'clip', 'loop'),
    [
        ({'shards': 1}, 1, 0.3, {}),
        ({'shards': 1}, 2, None, {}),
        ({'shards': 4}, 1, 0.3, {}),
        ({'shards': 4}, 2, None, {}),
        ({'mode': 'throughput', 'on_nan': 'skip'}, 1, None, {}),
        ({'mode': 'throughput', 'on_nan': 'skip'}, 1, None, {'micro_batch': 3}),
    ],
)
def test_a_scaler_skips_what_it_does_in_a_plain_loop(
    fork_server: ForkClient, tmp_path: Path, how: Any, scalers: int, clip: Any, loop: Any
) -> None:
    """With one virtual shard to the last bit, and with several the same bits for any ranks."""
    states, weights = train(None, scalers, clip)
    assert [state['scale'] for state in states] == [512.0, 16384.0][:scalers]
    found = []
    for sizes in ((1, 1),) if how == {'shards': 1} else ((1, 2), (2, 3)):
        for fragment, world_size in enumerate(sizes, 1):
            total = (CUT, TOTAL)[fragment - 1]
            ordered = order(tmp_path / f'{sizes}', fragment, total_samples=total, **how)
            args = world_size, tmp_path, train, scalers, clip
            outcomes = all_finish(fork_server, ordered, *args, **loop)
            assert 'skipped_steps' not in outcomes[0].metrics
        found.append(json.loads(outcomes[0].result))
        assert found[-1][0] == states
        for one, other in zip(found[-1][1], weights, strict=True):
            assert one == (other if how == {'shards': 1} else pytest.approx(other, 1e-5, 1e-6))
    assert found[0] == found[-1] or 'mode' in how


def test_what_a_part_of_a_batch_cannot_know_is_refused() -> None:
    for words, does, how in (
        ('get_scale() was called after scaler.update()', lambda one: one.get_scale(), {}),
        ('scaler.update was called twice', lambda one: one.update(), {}),
        ('own[0] is a gradient scaler and was not given to ctx.prepare', 'forget', {}),
        ('own[0] is a gradient scaler and was not', 'forget', {'mode': Throughput()}),
    ):
        body: Any = partial(train, does=does)
        assert words in refused_here(body, total_samples=TOTAL, **how)
