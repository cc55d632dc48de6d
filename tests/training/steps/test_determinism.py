"""Reproducible mode refuses what is not deterministic, and says what would be right."""

from pathlib import Path

import pytest
import torch
from torch import nn

from parsl_freetrain import BadInput, FragmentContext, Reproducible, same_weights
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import all_finish, order, ranks


def train(ctx: FragmentContext) -> None:
    from torch.backends import cudnn

    model = nn.Linear(1, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.use_deterministic_algorithms(False)
    cudnn.benchmark = True
    for batch in ctx.loop(torch.ones(8, 1), 4):
        assert torch.are_deterministic_algorithms_enabled() and not cudnn.benchmark
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        optimizer.zero_grad()
        model(batch).mean().backward()
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


def compiled(ctx: FragmentContext, whole: bool) -> None:
    from torch._dynamo import config  # cloudpickle cannot send this module

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.BatchNorm1d(8))
    fast = torch.compile(model, backend='aot_eager')
    fast, optimizer = ctx.prepare(fast, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        fast(batch).pow(2).mean().backward()
        optimizer.step()

    one = torch.compile(step, backend='aot_eager') if whole else step
    for batch in ctx.loop(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)), 8):
        one(batch)
    assert not config.automatic_dynamic_shapes


@pytest.mark.long
def test_what_is_compiled_on_any_ranks(fork_server: ForkClient, tmp_path: Path) -> None:
    """Each shape has kernels of its own: the ranks see different ones, as 8 samples in 3 shards."""
    found = []
    for count in (1, 2):
        ordered = order(folder := tmp_path / str(count), total_samples=24, shards=3)
        outcomes = all_finish(fork_server, ordered, count, folder, compiled, count == 2)
        found.append(outcomes[0].path)
    assert same_weights(*found)


def test_a_checkpoint_records_that_operations_need_not_be_deterministic(tmp_path: Path) -> None:
    strict, loose = (Reproducible(shards=2, warn_only=warn) for warn in (False, True))
    assert 'warn_only' not in strict.identity()
    claim(tmp_path / 'a', 'a', loose.identity(), 'auto')
    claim(tmp_path / 'a', 'a', loose.identity(), 'auto')
    with pytest.raises(BadInput, match='warn_only true'):
        claim(tmp_path / 'a', 'a', strict.identity(), 'auto')
