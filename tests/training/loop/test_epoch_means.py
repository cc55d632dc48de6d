"""Sums over an epoch: exact means of what is reported, and no sums of one rank's samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, refused, whole_and_cut
from tests.support.examples import equal

DATA = TensorDataset(torch.rand(22, 2, generator=torch.Generator().manual_seed(1)))


def made(ctx: FragmentContext) -> Any:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    return ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_means(ctx: FragmentContext, at: int, folder: Path) -> None:
    """The learning rate follows the mean of an epoch, as patience does."""
    model, optimizer = made(ctx)

    def end() -> None:
        optimizer.param_groups[0]['lr'] *= 1 - ctx.epoch_means['x']
        if ctx.is_main:
            with (folder / f'means-{at}').open('a') as file:
                file.write(f'{ctx.epoch_means["x"]!r}\n')

    ctx.each_epoch(end)
    for (x,) in ctx.loop(DATA, 5):
        ctx.report(x=x[:, 0].mean())
        model(x).square().mean().backward()
        optimizer.step()
        cut(ctx, at)


def test_means_over_an_epoch_depend_on_neither_nodes_nor_cuts(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    options = {'total_samples': None, 'total_epochs': 3}
    assert equal(*whole_and_cut(fork_server, tmp_path, by_means, tmp_path, at=27, **options))
    means = (tmp_path / 'means-0').read_text()
    assert means == (tmp_path / 'means-27').read_text()
    mean = float(DATA.tensors[0][:, 0].double().mean())
    assert [float(line) for line in means.split()] == pytest.approx([mean] * 3, rel=1e-6)


def counts(ctx: FragmentContext, where: str) -> None:
    model, optimizer = made(ctx)
    ctx.state['n'] = 0
    for (x,) in ctx.loop(DATA, 6):
        model(x).square().mean().backward()
        optimizer.step()
        if where == 'body' or ctx.is_main:
            ctx.state['n'] += len(x)


def test_a_state_that_differs_between_ranks_is_refused(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    options = {'world_size': 2, 'total_samples': 21, 'shards': 2}
    said = refused(fork_server, tmp_path, counts, 'body', **options)
    assert "ctx.state['n'] is 11 on rank 0 and 10 on rank 1" in said and 'ctx.epoch_means' in said
    with pytest.raises(AssertionError, match=r'\[\]'):  # nothing is refused
        refused(fork_server, tmp_path / 'main', counts, 'main', **options)
