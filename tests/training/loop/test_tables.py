"""Tables by the number of a sample have the entries of all ranks and virtual shards."""

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, same_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, made, step, trained
from tests.support.examples import in_this_process, refused_here

N, BATCH, EPOCHS = 96, 8, 3
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, torch.arange(N))


def by_sample(ctx: FragmentContext, at: int) -> list[Any]:
    """What each sample's loss was, which weighs the next epoch's."""
    model, optimizer = made(ctx, lr=0.02)
    losses, last, seen = np.full(N, np.nan, np.float32), torch.zeros(N, 2), set[int]()
    hard, times = dict[int, float](), [0] * N
    for _ in ctx.epochs():
        for x, i in ctx.loop(DATA, BATCH):
            known, each = np.nan_to_num(losses[i.numpy()]), model(x)[:, 0].square().detach()
            losses[i.numpy()], last[i] = each.numpy(), x
            for n, loss in zip(i.tolist(), each.tolist(), strict=True):
                seen.add(n)
                times[n] += 1
                hard.update({n: loss} if loss > 0.5 else {})
            step(model, optimizer, x * torch.tensor(1 + known / 10)[:, None])
            cut(ctx, at)
            time.sleep(0.1 * (at > 0))  # ranks agree the more often, the longer a step takes
    assert torch.equal(last, X)
    return [len(seen), *{*times}, float(losses.sum()), sum(hard.values())]


@pytest.mark.parametrize('mode', ['reproducible', 'throughput'])
def test_have_all_samples(fork_server: ForkClient, tmp_path: Path, mode: str) -> None:
    how: Any = {'mode': mode, 'total_samples': EPOCHS * N}
    two = trained(fork_server, tmp_path / '2', [3, 2], by_sample, 15 * BATCH, **how)
    assert json.loads(two.result)[:2] == [N, EPOCHS]
    if mode == 'reproducible':
        one = trained(fork_server, tmp_path / '1', [1], by_sample, 0, **how)
        assert one.result == two.result and same_weights(one.path, two.path)


def test_sums_by_class_are_told_from_samples_that_a_sampler_repeats() -> None:
    def train(ctx: FragmentContext, per: int) -> int:
        (model, optimizer), sums = made(ctx), np.zeros(N)
        for x, i in ctx.loop(DATA, BATCH, sampler=[0, 5, 10, 15, 20, 25, 0, 30]):
            np.add.at(sums, i // per, 1.0)
            step(model, optimizer, x)
        return int((sums > 0).sum())

    assert in_this_process(partial(train, per=1), total_samples=64)[0].result == 7
    refusal = refused_here(partial(train, per=15), total_samples=64)
    assert 'keep one number or tensor for each sample' in refusal
