"""Every optimizer of torch: cut trainings give the same bits, for any type and layout."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from parsl_freetrain import FragmentContext, Throughput, load_weights
from parsl_freetrain.training.checkpoint.optimizer_state import move_to_parameters
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import refused_here
from tests.support.ranks import all_finish, order

TOTAL, BATCH = 24, 4
LAST = torch.channels_last
SETTINGS: dict[str, dict[str, Any]] = {
    'ASGD': {'t0': 2},
    'Adadelta': {},
    'Adafactor': {},
    'Adagrad': {'lr_decay': 0.1},
    'Adam': {'amsgrad': True},
    'AdamW': {},
    'Adamax': {},
    'LBFGS': {'max_iter': 3},
    'Muon': {},
    'NAdam': {},
    'RAdam': {},
    'RMSprop': {'momentum': 0.9, 'centered': True},
    'Rprop': {},
    'SGD': {'momentum': 0.9},
    'SparseAdam': {},
}
# LBFGS needs several gradients for a step, and reproducible mode has one; sparse gradients cannot
# be added up there.
NOT_REPRODUCIBLE = {'LBFGS', 'SparseAdam'}


def kinds(reproducible: bool) -> list[tuple[str, torch.dtype, dict[str, bool]]]:
    """Name, type of the parameters, and implementation of each optimizer."""
    found = []
    for name in SETTINGS:
        if reproducible and name in NOT_REPRODUCIBLE:
            continue
        known = getattr(optim, name).__init__.__code__.co_varnames
        ways = [{'fused': True}] * ('fused' in known) + [{'foreach': True}] * ('foreach' in known)
        ways.append({way: False for way in ('fused', 'foreach') if way in known})
        found += [(name, torch.float32, way) for way in ways]
        found.append((name, torch.bfloat16, ways[0]))
    return found


def network(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    if name == 'SparseAdam':
        return nn.Embedding(8, 3, sparse=True, dtype=dtype)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 2), nn.Flatten())
    net.append(nn.Linear(8, 8, bias=False))
    # torch's LBFGS takes no other memory format.
    return net.to(dtype) if name == 'LBFGS' else net.to(dtype).to(memory_format=LAST)  # type: ignore[call-overload]


def backward(model: Any, optimizer: Any, own: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    if isinstance(own, nn.Embedding):
        made = model((batch[:, 0, 0] > 0).sum(1))
    else:
        made = model(batch.to(next(own.parameters()).dtype))
    loss: torch.Tensor = (made.float() - 1).pow(2).mean()
    loss.backward()
    return loss


def train(ctx: FragmentContext, reproducible: bool) -> None:
    things: list[Any] = []
    for name, dtype, way in kinds(reproducible):
        model = network(name, dtype)
        wanted = [p for p in model.parameters() if p.ndim == 2 or name != 'Muon']
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is p for p in wanted))
        things += [model, getattr(optim, name)(wanted, lr=0.01, **SETTINGS[name], **way)]
    prepared = ctx.prepare(*things)
    pairs = list(zip(prepared[::2], prepared[1::2], things[::2], strict=True))
    x = torch.randn(TOTAL, 3, 5, 5, generator=torch.Generator().manual_seed(5))
    for batch in ctx.loop(x, BATCH):
        for model, optimizer, own in pairs:
            optimizer.step(partial(backward, model, optimizer, own, batch))


def result(
    fork_server: ForkClient, folder: Path, mode: str, totals: tuple[int, ...]
) -> list[dict[str, torch.Tensor]]:
    """The weights of all models after fragments that end at these numbers of samples."""
    reproducible = mode == 'reproducible'
    path = ''
    for fragment, total in enumerate(totals, 1):
        ordered = order(folder, fragment, mode=mode, total_samples=total)
        path = all_finish(fork_server, ordered, 1, folder, train, reproducible)[0].path
    weights = load_weights(path)
    return [
        {
            name.partition('.')[2]: value
            for name, value in weights.items()
            if name.partition('.')[0] == (f'model_{i}' if i > 1 else 'model')
        }
        for i in range(1, len(kinds(reproducible)) + 1)
    ]


@pytest.mark.parametrize('mode', ['reproducible', 'throughput'])
def test_cut_is_uncut_fused_is_unfused(fork_server: ForkClient, tmp_path: Path, mode: str) -> None:
    whole = result(fork_server, tmp_path / 'whole', mode, (16,))
    cut = result(fork_server, tmp_path / 'cut', mode, (8, 16))
    all_kinds = kinds(mode == 'reproducible')
    assert [
        kind
        for kind, one, other in zip(all_kinds, whole, cut, strict=True)
        if not all(torch.equal(one[name], other[name]) for name in one)
    ] == []
    last: dict[tuple[str, torch.dtype], dict[str, torch.Tensor]] = {}
    # From the plain implementation, which is the last of each optimizer, back to the fused one.
    for (name, dtype, way), weights in reversed(list(zip(all_kinds, whole, strict=True))):
        plain = last.setdefault((name, dtype), weights)
        # bfloat16 is rounded in between by some implementations.
        assert dtype is torch.bfloat16 or all(
            torch.allclose(weights[key], plain[key], atol=1e-5) for key in plain
        ), (name, way)


def test_every_optimizer_of_torch_is_looked_at() -> None:
    ours = {
        name
        for name, kind in vars(optim).items()
        if isinstance(kind, type)
        and issubclass(kind, optim.Optimizer)
        and kind is not optim.Optimizer
    }
    assert ours == SETTINGS.keys()


def test_a_state_that_was_made_with_the_optimizer_follows_the_model_to_its_device() -> None:
    model = nn.Linear(2, 2, device='meta')
    optimizer = optim.Adagrad(model.parameters())
    for parameter in model.parameters():  # as if it had been made before the model was moved
        optimizer.state[parameter]['sum'] = torch.zeros(parameter.shape)
    move_to_parameters(optimizer)
    for state in optimizer.state.values():
        assert state['sum'].device.type == 'meta'
        assert state['step'].device.type == 'cpu'


def forgets_an_optimizer(ctx: FragmentContext) -> None:
    model = nn.Linear(3, 2)
    others = [optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    model, _ = ctx.prepare(model, optim.SGD(model.parameters(), lr=0.1))
    for batch in ctx.loop(torch.ones(TOTAL, 3), BATCH):
        model(batch).mean().backward()
        others[0].step()


def test_what_would_be_lost_between_fragments_is_refused() -> None:
    throughput: dict[str, Any] = {'mode': Throughput(), 'total_samples': TOTAL}
    said = refused_here(forgets_an_optimizer, **throughput)
    assert 'others[0] is an optimizer of a prepared model and was not given' in said
