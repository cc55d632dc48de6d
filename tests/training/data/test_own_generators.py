"""Random numbers from generators of the user's own depend on neither nodes nor cuts."""

from __future__ import annotations

import random
from collections import UserDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.data.own_generators import OwnGenerators
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import cut, whole_and_cut
from tests.support.examples import equal


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


def train(ctx: FragmentContext, at: int, where: str, kind: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    draw = KINDS[kind]()
    collates: dict[str, Any] = {
        'collate': lambda items: default_collate(items) * draw(),
        'late collate': Masks(),
    }
    data = Noisy(kind if 'dataset' in where else '', late='late' in where)
    for x in ctx.loop(
        data, 8, num_workers=2 if 'workers' in where else 0, collate_fn=collates.get(where)
    ):
        model(x * draw() if where == 'body' else x).square().mean().backward()
        optimizer.step()
        cut(ctx, at)


@pytest.mark.parametrize(
    ('where', 'kind'),
    [
        *(('body', kind) for kind in KINDS),
        ('dataset', 'numpy'),
        ('collate', 'torch'),
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
