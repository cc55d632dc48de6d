"""Scaled mode: what the batch, the learning rate and the order of samples are for any number of
ranks.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parsl_freetrain import BadInput, FragmentContext, Scaled
from parsl_freetrain.training.data.sample_order import GlobalOrder
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks

SIZE = 53  # no multiple of any batch below


@pytest.mark.parametrize(
    ('rule', 'ranks_', 'factor'),
    [
        ('linear', 8, 4.0),
        ('sqrt', 8, 2.0),
        ('none', 8, 1.0),
        (None, 6, 3.0),
        ('linear', 1, 0.5),
        ('sqrt', 2, 1.0),
    ],
)
def test_learning_rates(rule: Any, ranks_: int, factor: float) -> None:
    assert Scaled(reference_ranks=2, lr=rule).lr_factor(ranks_, 0) == factor


def test_warm_up_goes_from_1_to_the_full_factor_in_samples() -> None:
    scaled = Scaled(reference_ranks=1, lr='linear', warmup_samples=1000)
    assert [scaled.lr_factor(5, samples) for samples in (0, 250, 500, 1000, 10**6)] == [
        1.0,
        2.0,
        3.0,
        5.0,
        5.0,
    ]
    assert Scaled(reference_ranks=4, lr='linear', warmup_samples=1000).lr_factor(2, 0) == 0.5


def test_adasum_leaves_the_learning_rate_alone() -> None:
    assert Scaled(reference_ranks=1, combine='adasum').lr_factor(64, 0) == 1.0


def test_what_cannot_be_meant() -> None:
    for settings, sentence in (
        ({'reference_ranks': 0}, 'reference_ranks is 0'),
        ({'warmup_samples': -1}, 'warmup_samples is -1'),
        ({'combine': 'median'}, "combine is 'median'"),
        ({'lr': 'cubic'}, "lr is 'cubic'"),
        ({'lr': 'linear', 'combine': 'adasum'}, 'leave lr out'),
    ):
        with pytest.raises(BadInput, match=sentence):
            Scaled(**settings)


def test_the_batch_grows_with_the_ranks() -> None:
    assert [Scaled(reference_ranks=4).batch_size(32, n) for n in (1, 4, 6)] == [8, 32, 48]
    with pytest.raises(BadInput, match='30 is no multiple of 4'):
        Scaled(reference_ranks=4).batch_size(30, 2)


def test_the_order_of_samples_is_the_same_for_any_batches() -> None:
    def walk(sizes: list[int]) -> list[int]:
        seen: list[int] = []
        while len(seen) < 2 * SIZE:
            size = sizes[len(seen) % len(sizes)]
            batches = GlobalOrder(SIZE, size, 3, total_samples=2 * SIZE, aligned=False)
            seen += next(iter(batches.batches(len(seen)))).indices
        return seen

    assert walk([1]) == walk([4, 8, 12]) == walk([60, 7])


def train(ctx: FragmentContext, folder: Path, stop_at: int | None) -> None:
    import time

    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ctx.samples_lr(optimizer, lambda samples: 1 / (1 + samples))
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    before = model.weight.detach().clone() if ctx.world_size == 1 else None
    x = torch.arange(float(SIZE)).unsqueeze(1)
    for (batch,) in ctx.loop(list(zip(x, strict=True)), 4):
        base = optimizer.param_groups[0]['lr']
        assert math.isclose(base, 0.1 / (1 + ctx.samples)), (base, ctx.samples)
        with (folder / f'seen-{ctx.fragment}-{ctx.rank}').open('a') as file:
            file.write(json.dumps([ctx.samples, batch.flatten().tolist()]) + '\n')
        if stop_at is not None and ctx.samples >= stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        model(batch).sum().mul(0.0).backward()
        optimizer.step()
        scheduler.step()
        time.sleep(0.1)  # so that the ranks agree to stop within two or three steps
    assert before is None or torch.equal(before, model.weight)


def test_every_sample_once_per_epoch_over_rescales_and_uneven_batches(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    epochs = 3
    for fragment, (world_size, stop_at) in enumerate([(1, 8), (3, 40), (2, 100), (3, None)], 1):
        ordered = order(tmp_path, fragment, mode='scaled', total_samples=epochs * SIZE)
        with ranks(fork_server, ordered, world_size, tmp_path, train, tmp_path, stop_at) as gang:
            hows = {outcome.how for outcome in gang.run()}
        assert hows == {'finished' if stop_at is None else 'stopped'}, [
            rank.log.read_text() for rank in gang.ranks
        ]
    batches: dict[int, list[float]] = {}
    for path in sorted(tmp_path.glob('seen-*')):
        for line in path.read_text().splitlines():
            samples, values = json.loads(line)
            batches.setdefault(samples, []).extend(values)
    # A rank without a sample in the last batch of an epoch trains one that does not count, the
    # batch's first; it is in there twice.
    sizes = [
        min(b - a, SIZE)
        for a, b in zip(sorted(batches), [*sorted(batches)[1:], epochs * SIZE], strict=True)
    ]
    seen = Counter(
        value
        for (_, values), size in zip(sorted(batches.items()), sizes, strict=True)
        for value in (set(values) if len(values) > size else values)
    )
    assert seen == dict.fromkeys(map(float, range(SIZE)), epochs)
    assert {4, 8, 12} < set(sizes)
    assert sum(sizes) == epochs * SIZE


def lrs(ctx: FragmentContext) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.25))
    moved = []
    for x in ctx.loop(torch.ones(32, 1), 4):
        optimizer.zero_grad()
        before = float(next(model.parameters()))
        (-model(x).mean()).backward()
        optimizer.step()
        moved.append(float(next(model.parameters())) - before)
        assert optimizer.param_groups[0]['lr'] == 0.25
    assert moved == [0.25, 0.375, 0.5, 0.5], moved


def test_the_step_is_scaled_and_what_is_saved_is_not(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    ordered = order(tmp_path, mode='scaled', total_samples=32, scaled=Scaled(warmup_samples=16))
    with ranks(fork_server, ordered, 2, tmp_path, lrs) as gang:
        outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
