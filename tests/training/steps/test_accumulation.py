"""Micro-batches in throughput and scaled mode: the same steps as without them, in less memory."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import BadInput, FragmentContext, Reproducible, Samples, Scaled, Throughput
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Saved
from parsl_freetrain.training.loop.debugging import train_here
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.training import TrainingSpec
from tests.support.ranks import all_finish, ended, order

SIZE, BATCH, TOTAL = 37, 10, 74


def data() -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(SIZE, 5, generator=made), torch.randn(SIZE, 3, generator=made))


class Sometimes(nn.Module):
    """A network with a layer that only some samples use, and so only some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        some = (x[:, 0] > 0.5).unsqueeze(1)
        if some.any():
            x = x + some * self.extra(x)
        return self.last(x)  # type: ignore[no-any-return]


def train(ctx: FragmentContext, micro_batch: int | None, clears: str = 'before') -> None:
    """Two optimizers that step in turn, clipping, and a scheduler that takes the loss."""
    torch.manual_seed(3)
    one, two = Sometimes(), nn.Linear(3, 3)
    first = torch.optim.AdamW(one.parameters(), lr=0.02)
    second = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(second, factor=0.5, patience=0)
    one, two, first, second, scheduler = ctx.prepare(
        one, two, first, second, scheduler, clip_grad_norm=0.5, find_unused_parameters=True
    )
    for x, y in ctx.loop(data(), BATCH, micro_batch=micro_batch):
        assert micro_batch is None or len(x) <= micro_batch
        if clears == 'before':
            one.zero_grad()
        nn.functional.mse_loss(one(x), y).backward()
        first.step()
        one(x).sum().backward()  # as a second loss does, which goes through both
        second.zero_grad()
        loss = nn.functional.mse_loss(two(y), y)
        loss.backward()
        second.step()
        if ctx.world_size == 1:  # each rank has a loss of its own
            scheduler.step(loss.detach())
        if clears == 'behind':
            one.zero_grad()
        ctx.report(loss=float(loss.detach()))


def here(function: Callable[..., Any], mode: Any = None, *args: Any) -> Any:
    spec = TrainingSpec(min_nodes=1, max_nodes=1, goal=Samples(TOTAL), mode=mode or Throughput())
    return train_here('here', spec, function, args, {})


def weights(ctx: FragmentContext, kept: dict[str, Any], *args: Any) -> None:
    """Trains, and keeps what a checkpoint would."""
    train(ctx, *args)
    assert ctx._run.model is not None
    prepared = ctx._run.model.prepared
    kept['tensors'] = [tensor.detach().clone() for tensor in prepared.tensors()]
    kept['lr'] = prepared.schedulers[0].get_last_lr(), prepared.schedulers[0].last_epoch


@pytest.mark.parametrize('clears', ['before', 'behind'])
def test_on_one_rank_the_steps_are_those_of_whole_batches(clears: str) -> None:
    whole: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    one = here(weights, None, whole, None, clears)
    other = here(weights, None, parts, 3, clears)
    for a, b in zip(whole['tensors'], parts['tensors'], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert whole['lr'] == parts['lr']
    assert one.metrics['loss'] == pytest.approx(other.metrics['loss'], rel=1e-4)


def alone(ctx: FragmentContext, batch: int, micro_batch: int | None = None) -> None:
    torch.manual_seed(3)
    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = ctx.prepare(
        model, optimizer, clip_grad_norm=0.5, find_unused_parameters=True
    )
    for x, y in ctx.loop(data(), batch, micro_batch=micro_batch):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ('mode', 'one', 'other'),
    [
        ({'mode': 'throughput'}, (3, BATCH), (3, BATCH, 2)),
        ({'scaled': Scaled(combine='adasum')}, (2, BATCH), (2, BATCH, 2)),
        ({'mode': 'throughput'}, (1, 9), (3, 9, 2)),  # the last batch has one sample
    ],
)
def test_on_several_ranks_the_steps_are_those_of_whole_batches_and_of_one_rank(
    fork_server: ForkClient, tmp_path: Path, mode: Any, one: Any, other: Any
) -> None:
    """The last batch of an epoch has fewer samples on some ranks, and so do micro-batches."""
    found: list[Saved] = []
    for count, *args in (one, other):
        ordered = order(tmp_path / str(len(found)), total_samples=TOTAL, **mode)
        outcomes = all_finish(fork_server, ordered, count, tmp_path, alone, *args)
        found.append(read_state(outcomes[0].path))
    for name, tensor in found[0].models[0].items():
        torch.testing.assert_close(tensor, found[1].models[0][name], rtol=1e-4, atol=1e-6, msg=name)


def clips(ctx: FragmentContext, optimizer: Any, model: nn.Module, turn: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def steps_now_and_then(ctx: FragmentContext, optimizer: Any, model: nn.Module, turn: int) -> None:
    if turn % 4 == 3:
        optimizer.step()


def steps_twice(ctx: FragmentContext, optimizer: Any, model: nn.Module, turn: int) -> None:
    optimizer.step()
    optimizer.step()


def just_steps(ctx: FragmentContext, optimizer: Any, model: nn.Module, turn: int) -> None:
    optimizer.step()


def body(
    ctx: FragmentContext,
    does: Callable[..., None],
    kind: Any = torch.optim.SGD,
    micro_batch: int = 3,
    sparse: bool = False,
    kept: list[int] | None = None,
) -> None:
    model: nn.Module = nn.Embedding(5, 3, sparse=True) if sparse else nn.Linear(5, 3)
    optimizer = kind(model.parameters(), lr=0.1)
    model, optimizer = ctx.prepare(model, optimizer)
    for turn, (x, _) in enumerate(ctx.loop(data(), BATCH, micro_batch=micro_batch)):
        if kept is not None:
            kept.append(len(x))
        model(torch.arange(5) if sparse else x).pow(2).mean().backward()
        does(ctx, optimizer, model, turn)


def test_a_loop_that_micro_batches_would_change_is_refused() -> None:
    for arguments, words in (
        ((clips,), 'With micro_batch it is the gradient of a micro-batch there'),
        ((steps_now_and_then,), 'call optimizer.step.. once in each'),
        ((steps_twice,), 'called twice in one iteration'),
        ((just_steps, torch.optim.LBFGS), 'LBFGS computes the loss several times'),
        (
            (just_steps, torch.optim.SGD, 0),
            'micro_batch given to ctx.loop is 0; it must be 1 or more',
        ),
        ((just_steps, torch.optim.SGD, 3, True), 'cannot add up sparse gradients'),
    ):
        with pytest.raises(BadInput, match=words):
            here(body, None, *arguments)


def test_reproducible_mode_has_virtual_shards_for_that() -> None:
    """They must be small enough, and nothing else changes."""
    with pytest.raises(BadInput, match=r'of 10 samples has up to 5.*shards=4\) or more'):
        here(body, Reproducible(shards=2), just_steps)
    kept: list[int] = []
    here(body, Reproducible(shards=4), just_steps, torch.optim.SGD, 3, False, kept)
    assert max(kept) == 3


@cache
def graph_memory() -> torch.Tensor:
    return torch.zeros(3, 5)


class Graphed(torch.autograd.Function):
    """As a CUDA graph does, each backward pass writes the gradient into the same memory."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return graph_memory().copy_(gradients[0]).detach()


def graphed(ctx: FragmentContext, micro_batch: int | None = None, plain: bool = False) -> Any:
    torch.manual_seed(3)
    model = nn.Linear(5, 3, bias=False)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in ctx.loop(data(), BATCH, micro_batch=micro_batch):
        weight = model.weight if plain else Graphed.apply(model.weight)  # type: ignore[no-untyped-call]
        nn.functional.mse_loss(nn.functional.linear(x, weight), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().tolist()


def test_gradients_in_memory_of_a_graph_are_copied_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for mode, size in ((Reproducible(shards=4), None), (Throughput(), 3)):
        with pytest.raises(BadInput, match='memory that the next backward pass overwrites'):
            here(graphed, mode, size)
        with monkeypatch.context() as patch:  # torch's compiler has made graphs
            patch.setitem(sys.modules, 'torch._inductor.cudagraph_trees', sys)
            assert here(graphed, mode, size) == here(graphed, mode, size, True)


def accumulates(ctx: FragmentContext, by_hand: bool = False) -> list[float]:
    torch.manual_seed(3)
    model = nn.Linear(5, 3)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number, (x, y) in enumerate(
        ctx.loop(data(), 4, shuffle=False, accumulate=1 if by_hand else 3)
    ):
        assert len(x) <= 4
        nn.functional.mse_loss(model(x), y).backward()
        if not by_hand or number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [float(value) for value in model.weight.detach().flatten()]


@pytest.mark.parametrize(('mode', 'count'), [('reproducible', 2), ('throughput', 2)])
def test_accumulation(fork_server: ForkClient, tmp_path: Path, mode: str, count: int) -> None:
    """Steps of three batches each; by hand, what a fragment would drop at its end is refused."""
    ordered = order(tmp_path / '1', mode=mode, shards=3, total_samples=2 * SIZE)
    outcome = all_finish(fork_server, ordered, count, tmp_path, accumulates)[0]
    torch.manual_seed(3)
    model, (x, y) = nn.Linear(5, 3), data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (*torch.arange(SIZE).split(12), *torch.arange(SIZE).split(12)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    assert torch.tensor(json.loads(outcome.result)).allclose(model.weight.flatten(), atol=1e-5)
    ordered = order(tmp_path / '2', mode=mode, total_samples=SIZE)
    outcomes = ended(fork_server, ordered, count, tmp_path, accumulates, True)
    errors = [one.error.message for one in outcomes]
    assert any('say ctx.loop(..., accumulate=n)' in said for said in errors)
