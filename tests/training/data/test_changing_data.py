"""Data, samplers and generators that change from epoch to epoch: the same for any cuts."""

import random
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.data.own_generators import OwnGenerators
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, made, refused, whole_and_cut
from tests.support.examples import equal, refused_here
from tests.support.ranks import ended, order

EPOCHS: dict[str, Any] = {'total_samples': None, 'total_epochs': 3}
X = torch.arange(32.0).reshape(16, 2) / 32


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


def test_workers_see_that_a_dataset_was_changed(fork_server: ForkClient, tmp_path: Path) -> None:
    weights = [
        whole_and_cut(fork_server, tmp_path / str(workers), grow, workers, at=24, **EPOCHS)
        for workers in (0, 2)
    ]
    (one, two), (with_workers, cut_) = weights
    assert equal(one, two) and equal(one, with_workers) and equal(one, cut_)


def by_what_was_learned(ctx: FragmentContext, at: int, workers: int, within_epochs: bool) -> None:
    """Pseudo-labels, in place in what is not the user's class, and an order by losses."""
    model, optimizer = made(ctx)
    inner = TensorDataset(X.clone())
    data = Subset(inner, list(range(16)))

    def change() -> None:
        with torch.no_grad():
            losses = model(inner.tensors[0]).square()[:, 0]
            inner.tensors[0][8:] += 0.1 * losses[8:, None]
        data.indices = losses.argsort().tolist()

    def epochs() -> Iterator[None]:
        for _ in ctx.epochs():
            yield
            change()

    def train() -> None:
        for (x,) in ctx.loop(data, 4, num_workers=workers, shuffle=False):
            step(ctx, at, model, optimizer, x)

    if within_epochs:
        for _ in epochs():
            train()
    else:
        ctx.each_epoch(change)
        train()


@pytest.mark.parametrize(
    ('workers', 'at', 'within'), [(0, 40, True), (2, 24, False), (0, 32, True), (0, 12, True)]
)
def test_what_an_epoch_s_end_does_to_a_dataset_is_kept(
    fork_server: ForkClient, tmp_path: Path, workers: int, at: int, within: bool
) -> None:
    one, two = whole_and_cut(
        fork_server, tmp_path, by_what_was_learned, *(workers, within), at=at, shards=2, **EPOCHS
    )
    assert equal(one, two)


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


@pytest.mark.parametrize(('workers', 'at'), [(0, 32), (2, 24)])
def test_a_sampler_may_follow_the_losses_of_the_epoch_before(
    fork_server: ForkClient, tmp_path: Path, workers: int, at: int
) -> None:
    options: dict[str, Any] = {'at': at, **EPOCHS}
    assert equal(*whole_and_cut(fork_server, tmp_path, by_loss, workers, 'epoch', **options))


def test_a_sampler_that_changes_early_is_refused(fork_server: ForkClient, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match='the order of the samples has changed from sampled'):
        whole_and_cut(fork_server, tmp_path, by_loss, 0, 'body', at=24, total_samples=64)


def test_a_dataset_that_replaces_its_samples_beside_training_is_refused() -> None:
    class Replacing(Growing):
        def __init__(self) -> None:
            self.ends = Event()
            self.manager = Thread(target=self.ends.wait)

    def train(ctx: FragmentContext) -> None:
        made(ctx)
        ctx.loop(Subset(data, range(8)), 4)

    data = Replacing()
    data.manager.start()
    try:
        said = refused_here(train, total_samples=16)
    finally:
        data.ends.set()
        data.manager.join()
    assert 'A Replacing, the dataset.dataset given to ctx.loop, has a thread of its own' in said


def split(ctx: FragmentContext, at: int, how: str) -> None:
    model, optimizer = made(ctx)
    chosen = np.random.default_rng().permutation(16)[:12]
    data: Any = TensorDataset(X[chosen])
    if how == 'subset':
        data = Subset(TensorDataset(X), list(chosen))
    for batch in ctx.loop(data, 4):
        step(ctx, at, model, optimizer, batch[-1])


@pytest.mark.parametrize('how', ['tensors', 'subset'])
def test_splits_without_a_seed_are_refused(
    fork_server: ForkClient, tmp_path: Path, how: str
) -> None:
    said = refused(fork_server, tmp_path / '2', split, 0, how, world_size=2)
    assert 'is not the same on all ranks' in said and 'fixed seed' in said
    (one,) = ended(fork_server, order(tmp_path, total_samples=48), 1, tmp_path, split, 4, how)
    assert one.how == 'stopped'
    said = refused(fork_server, tmp_path, split, 0, how, fragment=2, total_samples=48)
    assert 'has changed since checkpoint' in said and ' has ' in said


def drawn_by(generator: torch.Generator) -> float:
    return torch.rand(1, generator=generator).item()


SHARED = np.random.default_rng(5)
KINDS: dict[str, Any] = {
    'numpy': lambda: np.random.default_rng().random,
    'numpy, as it was': lambda: np.random.RandomState(3).rand,
    'torch': lambda: partial(drawn_by, torch.Generator()),
    'random': lambda: random.Random().random,
    'of the module': lambda: lambda: SHARED.random(),
}


class Noisy(Dataset[Any]):
    """Draws noise as one of the kinds does; ``late``: which is made with the first sample."""

    def __init__(self, kind: str, *, late: bool = False) -> None:
        self.kind, self.draw = kind, None if late or not kind else KINDS[kind]()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.draw is None:
            self.draw = KINDS[self.kind]() if self.kind else lambda: 0.0
        return torch.tensor([index / 32, self.draw()])


class Masks:
    """Collates, and makes its generator with the first batch."""

    draw: Any = None

    def __call__(self, items: list[Any]) -> torch.Tensor:
        self.draw = self.draw or partial(drawn_by, torch.Generator().manual_seed(1))
        found: torch.Tensor = default_collate(items) * self.draw()
        return found


class Drawing(torch.nn.Linear):
    """Draws noise in each pass, by a generator of its own."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.draw = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand(1, generator=self.draw))


def train(ctx: FragmentContext, at: int, where: str, kind: str) -> None:
    if where == 'model':
        torch.manual_seed(1)
        drawing = Drawing()
        model, optimizer = ctx.prepare(drawing, torch.optim.SGD(drawing.parameters(), lr=0.1))
    else:
        model, optimizer = made(ctx)
    draws = [make() for make in KINDS.values()] if where == 'body' else []
    data = Noisy(kind if 'dataset' in where else '', late='late' in where)
    workers = 2 if 'workers' in where else 0
    collate: Any = Masks() if where == 'late collate' else None
    for x in ctx.loop(data, 8, num_workers=workers, collate_fn=collate):
        for one in draws:
            x = x * (1 + one())
        step(ctx, at, model, optimizer, x)


@pytest.mark.parametrize(
    ('where', 'kind'),
    [
        ('body', 'all'),
        ('model', ''),
        ('dataset', 'numpy'),
        ('late collate', 'torch'),
        ('dataset of workers', 'numpy, as it was'),
        ('late dataset of workers', 'random'),
    ],
)
def test_the_same_weights(fork_server: ForkClient, tmp_path: Path, where: str, kind: str) -> None:
    assert equal(*whole_and_cut(fork_server, tmp_path, train, where, kind, at=24, total_samples=64))


class Missing(UserDict[str, Any]):
    """A configuration in which a value is missing, as omegaconf's."""

    def items(self) -> Any:
        raise ValueError('missing mandatory value')


def test_what_raises_when_it_is_looked_at_is_not_looked_into() -> None:
    assert OwnGenerators().find({'config': Missing(a=1), 'own': random.Random()}) == ['own']


def test_of_each_its_own_numbers_again_and_again() -> None:
    own, both = OwnGenerators(), [np.random.default_rng(), np.random.default_rng()]
    assert own.find({'both': both, 'again': both, 'all': random.random}) == ['both[0]', 'both[1]']
    drawn = []
    for seed in (1, 2, 1):
        own.seed(seed)
        drawn.append([generator.random() for generator in both])
    assert drawn[0] == drawn[2] != drawn[1]
    assert len({number for two in drawn[:2] for number in two}) == 4
