"""In reproducible mode, what asks torch.distributed takes itself for alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parsl_freetrain import FragmentContext, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import equal
from tests.support.ranks import all_finish, order, ranks


def train(ctx: FragmentContext, asked: bool = False, *, unasked: bool = False) -> None:
    """A loss as MACE's exchanges the number of samples; the set-up exchanges, too."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    ranks: list[Any] = [0] * ctx.world_size
    if dist.is_initialized():
        dist.all_gather_object(ranks, ctx.rank)
    assert ranks == list(range(ctx.world_size))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if asked:
        number = torch.tensor([ctx.rank])
        dist.all_reduce(number, group=ctx.torch_distributed())
        assert number.item() == sum(range(ctx.world_size))
    if unasked:
        dist.barrier()
    for x in ctx.loop(torch.arange(36.0).reshape(18, 2) / 36, 6):
        optimizer.zero_grad()
        number = torch.tensor(float(len(x)))
        if dist.is_initialized():
            dist.all_reduce(number)
        (model(x).square().sum() / number).backward()
        optimizer.step()


def test_a_loss_that_exchanges(fork_server: ForkClient, tmp_path: Path) -> None:
    """With different numbers of shards on two ranks, which would wait for each other."""

    def result(world_size: int) -> Any:
        ordered = order(tmp_path / f'{world_size}', shards=3, total_samples=36)
        return load_weights(all_finish(fork_server, ordered, world_size, tmp_path, train)[0].path)

    assert equal(result(1), result(2))


@pytest.mark.parametrize('world_size', [1, 2])
def test_exchanges_are_refused(fork_server: ForkClient, tmp_path: Path, world_size: int) -> None:
    ordered = order(tmp_path, shards=3, total_samples=36)
    with ranks(fork_server, ordered, world_size, tmp_path, train, True) as gang:
        outcomes = gang.run()
    assert {outcome.error.type for outcome in outcomes} <= {'BadInput', 'PeerLost'}
    told = [o.error.message for o in outcomes if o.error.type == 'BadInput']
    assert told and all('torch.distributed (allreduce of a process group)' in text for text in told)


def test_the_hidden_group_is_refused_by_name(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, order(tmp_path), 2, tmp_path, train, unasked=True) as gang:
        told = [outcome.error for outcome in gang.run()]
    assert {error.type for error in told} <= {'BadInput', 'PeerLost'}
    assert any('say ctx.torch_distributed() before' in error.message for error in told)
