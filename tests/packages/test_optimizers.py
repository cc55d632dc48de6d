"""All optimizers of pytorch_optimizer: a cut training has the same bits, or is refused."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from parsl_freetrain import BadInput
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.state import Position, collect, content_of, restore
from parsl_freetrain.training.checkpoint.trainables import Prepared, sort_out
from parsl_freetrain.training.checkpoint.trial import try_optimizers
from tests.support.examples import equal
from tests.training.checkpoint.test_checkpoint_state import committed

library: Any = pytest.importorskip('pytorch_optimizer')
REFUSED = {
    'adashift': 'has a deque',
    'conda': 'has a GaLoreProjector',
    'scalableshampoo': 'has a PreConditioner',
}
OTHERWISE = {
    'adalomo': 'steps in the backward pass',
    'alig': 'needs a closure that does not train',
    'demo': 'needs einops',
    'distributedmuon': 'exchanges by itself',
    'lomo': 'steps in the backward pass',
    'sophiah': 'needs second derivatives',
    'spectralsphere': 'has matrices only',
}


def ways(kind: Any, model: nn.Module) -> list[Callable[[], Any]]:
    """How an optimizer may be made."""
    few = [p for p in model.parameters() if p.ndim != 2]
    two = [{'params': few}, {'params': [p for p in model.parameters() if p.ndim == 2]}]
    groups = [{**group, 'use_muon': bool(i), 'algorithm': 'adamw'} for i, group in enumerate(two)]
    return [
        lambda: kind(model.parameters(), lr=1e-2),
        lambda: kind(model.parameters()),
        lambda: kind(model.parameters(), num_data=32),
        lambda: kind(model.parameters(), num_iterations=10),
        lambda: kind(groups),
        lambda: kind(model),
    ]


def made(name: str, way: int) -> Prepared:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 1))
    return sort_out((model, ways(library.load_optimizer(name), model)[way]()))


def train(prepared: Prepared, steps: range) -> Prepared:
    (model,), optimizer = prepared.models, cast(Any, prepared.optimizers[0])
    for number in steps:
        torch.manual_seed(number)
        x = torch.randn(8, 6)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = (model(x) - x.sum(1, keepdim=True)).square().mean()
            value.backward(create_graph='hessian' in str(optimizer).lower())
            return value

        loss()
        try:
            optimizer.step()
        except (TypeError, library.base.exception.NoClosureError):
            optimizer.step(loss)
    return prepared


def way_of(name: str) -> int:
    for way in range(6):
        with suppress(Exception):
            train(made(name, way), range(2))
            return way
    pytest.skip(OTHERWISE[name])


@pytest.mark.parametrize('name', sorted(library.get_supported_optimizers()))
def test_cut(name: str, tmp_path: Path) -> None:
    way = way_of(name)
    if name in REFUSED:
        with pytest.raises(BadInput, match=REFUSED[name]):
            try_optimizers(made(name, way))
        return
    try_optimizers(made(name, way))
    state = content_of(train(made(name, way), range(4)))
    position = Position(4, 9, 0, 8, 8, 0)
    cut = made(name, way)
    restore(cut, read_state(committed(tmp_path / 'c', collect(state, position))))
    whole = train(made(name, way), range(8))
    assert equal(whole.models[0].state_dict(), train(cut, range(4, 8)).models[0].state_dict())
