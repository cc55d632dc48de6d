"""Data and samplers that change from epoch to epoch: the same weights for any nodes and cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, refused, whole_and_cut
from tests.support.examples import equal
from tests.support.ranks import order, ranks

EPOCHS = {'total_samples': None, 'total_epochs': 4}
X = torch.arange(32.0).reshape(16, 2) / 32


def made(ctx: FragmentContext) -> Any:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step(ctx: FragmentContext, at: int, model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    cut(ctx, at)


class Growing(Dataset[Any]):
    size = 1

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index] * self.size


def grow(ctx: FragmentContext, at: int, workers: int) -> None:
    model, optimizer = made(ctx)
    data = Growing()
    for epoch in ctx.epochs():
        data.size = epoch + 1
        for x in ctx.loop(data, 4, num_workers=workers):
            step(ctx, at, model, optimizer, x)


def test_workers_see_a_dataset_that_is_changed_before_an_epoch(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    weights = [
        whole_and_cut(
            fork_server,
            tmp_path / str(workers),
            grow,
            workers,
            at=24,
            total_samples=None,
            total_epochs=3,
        )
        for workers in (0, 2)
    ]
    (one, two), (with_workers, cut_) = weights
    assert equal(one, two) and equal(one, with_workers) and equal(one, cut_)


def by_loss(ctx: FragmentContext, at: int, workers: int, where: str) -> None:
    model, optimizer = made(ctx)

    def hard(epoch: int) -> list[int]:
        weights = torch.tensor(ctx.state.get('weights', [1.0] * 16))
        return torch.multinomial(weights, 16, replacement=True).tolist()

    def measure() -> None:
        with torch.no_grad():
            ctx.state['weights'] = model(X).square()[:, 0].tolist()

    ctx.each_epoch(measure)
    for (x,) in ctx.loop(TensorDataset(X), 4, sampler=hard, num_workers=workers):
        step(ctx, at, model, optimizer, x)
        if where == 'body':
            ctx.state['weights'] = [ctx.samples + 1.0, *range(1, 16)]


@pytest.mark.parametrize('at', [24, 32])
@pytest.mark.parametrize('workers', [0, 2])
def test_a_sampler_may_follow_the_losses_of_the_epoch_before(
    fork_server: ForkClient, tmp_path: Path, workers: int, at: int
) -> None:
    assert equal(
        *whole_and_cut(
            fork_server,
            tmp_path,
            by_loss,
            workers,
            'epoch',
            at=at,
            total_samples=None,
            total_epochs=4,
        )
    )


def test_a_sampler_that_changes_within_an_epoch_is_refused(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match='the order of the samples has changed from sampled'):
        whole_and_cut(fork_server, tmp_path, by_loss, 0, 'body', at=24, total_samples=64)


def split(ctx: FragmentContext, at: int, how: str) -> None:
    model, optimizer = made(ctx)
    chosen = np.random.default_rng().permutation(16)[:12]
    data: Any = TensorDataset(X[chosen])
    if how == 'list':
        data = [(torch.tensor(i), X[i]) for i in chosen]
    elif how == 'subset':
        data = Subset(TensorDataset(X), chosen.tolist())
    for batch in ctx.loop(data, 4):
        step(ctx, at, model, optimizer, batch[-1])


@pytest.mark.parametrize('how', ['tensors', 'list', 'subset'])
def test_data_that_are_split_without_a_seed_are_refused(
    fork_server: ForkClient, tmp_path: Path, how: str
) -> None:
    said = refused(fork_server, tmp_path / '2', split, 0, how, world_size=2)
    assert 'is not the same on all ranks' in said and 'fixed seed' in said
    with ranks(fork_server, order(tmp_path, total_samples=48), 1, tmp_path, split, 4, how) as gang:
        assert [one.how for one in gang.run()] == ['stopped']
    said = refused(fork_server, tmp_path, split, 0, how, fragment=2, total_samples=48)
    assert 'has changed since checkpoint' in said and ' has ' in said
