"""What a body of the loop changes is the same on all ranks, or it is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, load_weights, same_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import ended, order

DATA = TensorDataset(torch.linspace(-1, 2, 34).reshape(17, 2))  # the last batch has one sample


class Centred(nn.Module):
    """Takes off a running mean, which is another tensor after each pass."""

    mean: torch.Tensor
    turn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer('mean', torch.zeros(2))
        self.register_buffer('turn', torch.ones(2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.turn.mul_(torch.exp(1j * x.mean(0)))
        return self.linear((x - self.mean) * self.turn.real)


def train(
    ctx: FragmentContext,
    before: Callable[[Any, Any, float], object] = lambda ctx, group, loss: None,
    after: Callable[[Any, Any, float], object] = lambda ctx, group, loss: None,
    patience: int | None = None,
    spoils: bool = False,
) -> None:
    """``before`` and ``after`` the step, the group of the optimizer is given to a function."""
    torch.manual_seed(1)
    model = Centred()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=10 if patience is None else patience)
    model, optimizer, plateau = ctx.prepare(model, optimizer, plateau)
    if spoils and ctx.rank == 1:
        inner = getattr(model, 'module', model)
        ctx.after_step(lambda: inner.linear.bias.data.add_(1))
    for (x,) in ctx.loop(DATA, 4):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        before(ctx, optimizer.param_groups[0], loss.item())
        optimizer.step()
        after(ctx, optimizer.param_groups[0], loss.item())
        if patience is not None:
            plateau.step(loss.item())


def by_samples(ctx: Any, group: Any, loss: float) -> None:
    group.update(lr=0.9 * group['lr'], betas=(0.9, 0.999 - ctx.samples / 1e3))


def by_loss(ctx: Any, group: Any, loss: float) -> None:
    group['lr'] = 0.1 / (1 + loss)


def put_back(ctx: Any, group: Any, loss: float) -> None:
    group['lr'] = 0.1


def run(
    fork_server: ForkClient, folder: Path, world_size: int, mode: str, **options: Any
) -> list[Any]:
    ordered = order(folder, mode=mode, total_samples=34)
    return ended(fork_server, ordered, world_size, folder, train, **options)


@pytest.mark.parametrize(
    ('options', 'world_size', 'mode', 'sentence'),
    [
        ({'before': by_loss}, 1, 'reproducible', "set 'lr' in parameter group 0 of optimizer 1 to"),
        ({'before': by_loss}, 2, 'throughput', "different values of 'lr' in parameter group 0"),
        ({'after': by_samples}, 1, 'reproducible', "changed 'lr' in parameter group 0 of optimi"),
        ({'before': by_loss, 'after': put_back}, 2, 'throughput', 'steps with different settings'),
        ({'patience': 100}, 2, 'throughput', "not train the same model: 'best' of scheduler 1 is"),
        ({'spoils': True}, 2, 'throughput', "the norm of parameter 'linear.bias' is"),
    ],
)
def test_what_differs_between_ranks_is_refused(
    fork_server: ForkClient,
    tmp_path: Path,
    options: dict[str, Any],
    world_size: int,
    mode: str,
    sentence: str,
) -> None:
    for outcome in run(fork_server, tmp_path, world_size, mode, **options):
        assert (outcome.how, outcome.error.type) == ('error', 'BadInput'), outcome.error
        assert sentence in outcome.error.message
        assert '\n' not in outcome.error.message


def test_what_does_not_depend_on_the_ranks(fork_server: ForkClient, tmp_path: Path) -> None:
    """Also where a rank has no part of a short batch, and for buffers that are replaced."""
    paths = []
    for world_size in (1, 3):
        how: dict[str, Any] = {'before': by_samples, 'patience': 0}
        outcomes = run(fork_server, tmp_path / str(world_size), world_size, 'reproducible', **how)
        assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
        paths.append(outcomes[0].path)
    assert same_weights(*paths)
    weights = load_weights(paths[0])
    assert weights['mean'].abs().min() > 0 and weights['turn'].imag.abs().min() > 0
    outcomes = run(fork_server, tmp_path / 'throughput', 2, 'throughput', before=by_samples)
    assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
