"""Reproducible mode refuses what is not deterministic, and says what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from parsl_freetrain import BadInput, Reproducible
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import order, ranks


def train(ctx: FragmentContext) -> None:
    from torch.backends import cudnn

    model = nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark = True
    for batch in ctx.loop(torch.ones(8, 1), 4):
        assert torch.are_deterministic_algorithms_enabled()
        assert not cudnn.benchmark
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


@pytest.mark.parametrize('warn_only', [False, True])
def test_an_operation_that_is_not_deterministic_is_refused_unless_the_mode_allows_it(
    fork_server: ForkClient, tmp_path: Path, warn_only: bool
) -> None:
    ordered = order(tmp_path, total_samples=8, warn_only=warn_only)
    with ranks(fork_server, ordered, 1, tmp_path, train) as gang:
        (outcome,) = gang.run()
        assert 'put_ does not have a deterministic' in gang.ranks[0].log.read_text()
    assert outcome.how == ('finished' if warn_only else 'error'), outcome.error
    if not warn_only:
        assert outcome.error.type == 'BadInput'
        assert 'put_ does not have a deterministic implementation' in outcome.error.message
        assert 'Reproducible(warn_only=True)' in outcome.error.message


def test_a_checkpoint_records_that_operations_need_not_be_deterministic(tmp_path: Path) -> None:
    strict, loose = Reproducible(shards=2), Reproducible(shards=2, warn_only=True)
    assert 'warn_only' not in strict.identity()
    claim(tmp_path / 'a', 'a', loose.identity(), 'auto')
    claim(tmp_path / 'a', 'a', loose.identity(), 'auto')
    with pytest.raises(BadInput, match='warn_only true'):
        claim(tmp_path / 'a', 'a', strict.identity(), 'auto')
