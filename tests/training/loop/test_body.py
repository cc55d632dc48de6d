"""What a body may do with batches and losses, and what is refused in its first iterations."""

import dis
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from parsl_freetrain import BadInput, FragmentContext, load_weights
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader_settings import LoaderData, LoaderSettings
from parsl_freetrain.training.data.together import Together
from parsl_freetrain.training.loop.body import _going_on
from parsl_freetrain.training.loop.loss import refuse_wrong
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, made, refused, step, whole_and_cut
from tests.support.examples import equal, in_this_process, refused_here
from tests.support.ranks import all_finish, order

X = torch.arange(64.0).reshape(32, 2) / 64
DATA, OTHERS = TensorDataset(X), TensorDataset(torch.arange(50.0)[:, None] / 50)
MASK = (torch.arange(32) % 3 > 0).float()[:, None]


LOSSES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    'mean': lambda model, x, mask: model(x).square().mean(),
    'sum': lambda model, x, mask: F.mse_loss(model(x), x[:, :1], reduction='sum') / 8,
    'counted': lambda model, x, mask: (model(x).square() * mask).sum() / mask.sum(),
}


def by_loss(ctx: FragmentContext, kind: str) -> None:
    model, optimizer = made(ctx)
    loss: Any = (lambda batch: batch[1].sum()) if kind == 'counted' else kind
    for x, mask in ctx.loop(TensorDataset(X, MASK), 16, shuffle=False, loss=loss):
        optimizer.zero_grad()
        LOSSES[kind](model, x, mask).backward()
        optimizer.step()


@pytest.mark.parametrize('kind', LOSSES)
def test_parts_count_as_the_loss_says(fork_server: ForkClient, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for at in (0, 16, 0, 16):
        optimizer.zero_grad()
        LOSSES[kind](model, X[at : at + 16], MASK[at : at + 16]).backward()
        optimizer.step()
    for number, (mode, shards, count) in enumerate((('reproducible', 5, 2), ('throughput', 1, 3))):
        ordered = order(tmp_path / str(number), mode=mode, shards=shards, total_samples=64)
        outcome = all_finish(fork_server, ordered, count, tmp_path, by_loss, kind)[0]
        found = load_weights(outcome.path)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach())


def plain_losses() -> Iterator[tuple[str, torch.Tensor, bool]]:
    weight = torch.rand(4, 3, requires_grad=True)
    x, points = torch.eye(4) @ weight, torch.rand(5, 3) * weight[0]
    growth = x.amax(1)
    for _ in range(40):
        growth = growth + 0.1 * growth * (1 - growth)
    yield 'steps in time', growth.square().sum(), True
    yield 'sum over the first axis', x.square().sum(0).sum(), True
    yield 'points of an equation', points.square().sum(), False
    yield 'times a share', x.square().sum() * (1 / 4), False
    yield 'reduction', F.binary_cross_entropy(x, torch.ones(4, 3), reduction='sum'), True
    yield 'cross entropy', F.cross_entropy(x, torch.zeros(4).long(), reduction='sum'), True
    dense = F.cross_entropy(torch.stack([x, -x], 1), torch.zeros(4, 3).long(), reduction='sum')
    yield 'mean over pixels', dense / 12, False
    yield 'mean', F.mse_loss(x, torch.ones(4, 3)), False
    yield 'divided by what was counted', x.sum() / (x > 0.5).sum(), False
    yield 'divided by a fixed number', x.sum() / 6, True
    yield 'penalty', F.cross_entropy(x, torch.zeros(4).long()) + 0.1 * x.abs().sum(), False


def test_a_plain_sum_is_told_from_a_mean() -> None:
    for name, loss, is_sum in plain_losses():
        try:
            refuse_wrong(loss, [torch.ones(4, 3), {'y': torch.ones(4)}], None)
        except BadInput as error:
            found = is_sum and "say ctx.loop(..., loss='sum')" in str(error)
        else:
            found = not is_sum
        assert found, name


def test_a_mean_by_weights_and_a_penalty_in_a_sum_are_told_from_others() -> None:
    weight, labels, classes = torch.rand(4, 3, requires_grad=True), torch.tensor([0, 1, 2, 0]), 3
    x, batch = torch.eye(4) @ weight, [torch.ones(4, 3), labels]
    by_weights = F.cross_entropy(x, labels, torch.arange(1.0, 1 + classes))
    for said, loss, own, sentence in (
        (None, by_weights, True, 'weight[batch[1]]'),
        (None, by_weights, False, ''),
        (None, F.cross_entropy(x, labels, torch.ones(classes)), True, ''),
        ('sum', x.square().sum() + 0.1 * weight[:, 0].norm(), True, ''),
        ('sum', x.square().sum() / 8 + 0.1 * weight.square().sum(), True, 'weights alone'),
        ('sum', x.square().sum() + (weight - 1).norm(), True, 'weights alone'),
        ('sum', x.square().sum() + (x - 1).abs().sum() / 2, True, ''),
    ):
        with pytest.raises(BadInput, match=re.escape(sentence)) if sentence else nullcontext():
            refuse_wrong(loss, batch, said, own=own)  # type: ignore[arg-type]


@pytest.mark.parametrize('mean', [True, False])
def test_a_batch_that_is_left_out_by_a_sum_times_0(mean: bool) -> None:
    def train(ctx: FragmentContext) -> None:
        model, optimizer = made(ctx)
        for (x,) in ctx.loop(DATA, 8):
            loss = model(x).square()
            loss = loss.mean() if mean and ctx.samples else loss.sum() * float(ctx.samples > 0)
            loss.backward()
            optimizer.step()

    if mean:
        in_this_process(train, total_samples=32)
    else:
        assert 'is a sum over samples' in refused_here(train, total_samples=32)


TWO = {'mode': 'throughput', 'world_size': 2}


def reads_beside(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    others = itertools.cycle(DataLoader(OTHERS, batch_size=4))
    for (x,) in ctx.loop(DATA, 8):
        next(others)
        step(model, optimizer, x)


class Queue(Dataset[Any]):
    """As torchio's: what is asked for makes no difference."""

    def __init__(self) -> None:
        self.source = iter(DataLoader(DATA))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return next(self.source)[0]


def reads_a_queue(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    for x in ctx.loop(Queue(), 8):
        step(model, optimizer, x[:, 0])


def prefetched(batches: Any) -> Iterator[Any]:
    before = next(batches)
    for now in batches:
        yield before
        before = now


def prefetches(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    for (x,) in prefetched(ctx.loop(DATA, 8)):
        step(model, optimizer, x)


def adds_up(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    for (x,) in ctx.loop(DATA, 8):
        model(x).square().sum().backward()
        optimizer.step()


def skips(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    for (x,) in ctx.loop(DATA, 8):
        if ctx.rank == 1 and ctx.samples == 8:
            continue
        step(model, optimizer, x)


def only_looks(ctx: FragmentContext, model: Any, optimizer: Any) -> None:
    for (x,) in ctx.loop(DATA, 8):
        model(x)
        (x @ model.weight.T).square().mean().backward()
        optimizer.step()


def body(ctx: FragmentContext, function: Callable[..., None]) -> None:
    function(ctx, *made(ctx))


@pytest.mark.parametrize(
    ('function', 'sentence', 'options'),
    [
        (reads_beside, 'others reads a DataLoader beside ctx.loop', {}),
        (reads_a_queue, 'dataset.source reads a DataLoader', {}),
        (prefetches, 'If something looks ahead in it, leave that out', {}),
        (adds_up, 'is a sum over samples', {}),
        (only_looks, 'not reach all', TWO),
        (skips, 'ended without backward() on this rank', TWO),
    ],
)
def test_what_would_be_lost_or_wrong_is_refused(
    fork_server: ForkClient, tmp_path: Path, function: Any, sentence: str, options: Any
) -> None:
    assert sentence in refused(fork_server, tmp_path, body, function, **options)


class Meter:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def add(self, output: torch.Tensor) -> None:
        self.seen.append(output)

    def accuracy(self) -> float:
        return float((torch.cat(self.seen) > 0).float().mean())


class Cached(Dataset[Any]):
    def __init__(self) -> None:
        self.cache: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.cache.setdefault(index, DATA[index][0] / 2)


def collects(ctx: FragmentContext, at: int) -> None:
    """Predictions, a hook, a batch for a look, a first batch left out, a dataset's cache."""
    model, optimizer = made(ctx)
    seen: dict[str, torch.Tensor] = {}
    model.register_forward_hook(lambda _, __, out: seen.update(out=out.detach()))
    ctx.after_step(lambda: nn.init.zeros_(model.bias))  # that is no training
    width, data = next(iter(DataLoader(OTHERS, batch_size=4)))[0].shape[1], Cached()
    for _ in ctx.epochs():
        meter, outputs, targets = Meter(), [], []
        for x in ctx.loop(data, 8):
            if ctx.samples in (0, 8 * width):
                continue
            output = model(x)
            (output.square() + 0 * seen['out']).mean().backward()
            optimizer.step()
            meter.add(output.detach())
            outputs.append(output.detach().numpy())
            targets.append(x[:, :1])
            cut(ctx, at)
        ctx.report(accuracy=meter.accuracy(), mean=float(np.concatenate(outputs).mean()))


def test_what_is_only_collected_or_left_out(fork_server: ForkClient, tmp_path: Path) -> None:
    assert equal(*whole_and_cut(fork_server, tmp_path, collects, at=40, total_samples=96))


def semi_supervised(ctx: FragmentContext, at: int, workers: int) -> None:
    model, optimizer = made(ctx)
    labelled = DataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)
    for (x,), (u,) in ctx.loop((labelled, DataLoader(OTHERS, batch_size=12, shuffle=True))):
        assert len(u) == 3 * len(x)
        (model(x).square().mean() + model(u.expand(-1, 2)).mean()).backward()
        optimizer.step()
        cut(ctx, at)


def test_several_datasets_at_once(fork_server: ForkClient, tmp_path: Path) -> None:
    options: dict[str, Any] = {'at': 40, 'total_samples': 96}
    assert equal(*whole_and_cut(fork_server, tmp_path, semi_supervised, 2, **options))


def test_the_samples_of_other_datasets_come_in_turn() -> None:
    loaders = [DataLoader(DATA, batch_size=4), DataLoader(OTHERS, batch_size=6, shuffle=True)]
    own = Together.of([LoaderData.of_loop(one, None, LoaderSettings()) for one in loaders]).dataset
    own.begin(7, Peers())
    taken = [i for index in own.indices(range(32), 0) for i in index[1][0]]
    taken += [i for index in own.indices(range(2), 32) for i in index[1][0]]
    assert len(taken) == 51 and sorted(taken[:50]) == list(range(50)) != taken[:50]
    with pytest.raises(BadInput, match='put the one with the smallest batches first'):
        Together.of([LoaderData.of_loop(one, None, LoaderSettings()) for one in loaders[::-1]])


def contrastive(ctx: FragmentContext) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 3)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in ctx.loop(DATA, 16, shuffle=False):
        optimizer.zero_grad()
        one, two = ctx.all_gather(model(x)), ctx.all_gather(model(x.flip(1)))
        F.cross_entropy(one @ two.T, torch.arange(len(one))).backward()
        optimizer.step()


def test_a_loss_over_the_samples_of_all_ranks(fork_server: ForkClient, tmp_path: Path) -> None:
    found = []
    for world_size in (1, 3):  # 16 samples on 3 ranks: 6, 5, 5
        folder = tmp_path / str(world_size)
        ordered = order(folder, mode='throughput', total_samples=64)
        outcome = all_finish(fork_server, ordered, world_size, folder, contrastive)[0]
        found.append(load_weights(outcome.path))
    torch.testing.assert_close(found[1], found[0])
    said = refused(fork_server, tmp_path / 'shards', contrastive)
    assert 'with 4 virtual shards, which are trained one after the other' in said


def test_what_goes_from_an_iteration_to_the_next() -> None:
    def function(loop: Any, model: Any, log: Any) -> Any:
        step = count = total = mean = 0
        hidden = last = None
        for x, y in loop:
            count += len(x)
            out, hidden = model(x, hidden)
            loss = (out - y) * 0.9**step
            total = total + loss
            mean = 0.9 * mean + 0.1 * loss
            log.append(total)
            step, last = step + 1, loss
        return last, count, mean

    loop = next(s for s in dis.get_instructions(function) if s.opname == 'FOR_ITER')
    assert _going_on(function.__code__, loop.offset) == {'step', 'hidden', 'total'}
