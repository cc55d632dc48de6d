"""A search over 30 settings of a small network by successive halving: each round keeps the better
third and trains it three times as long.

``freetrain run workflows/hpo.py --site local``, or ``python -m workflows.hpo`` for four slots of
this computer. Every setting of every round is one trainer; the weights of one round are an argument
of the next. On the method: Jamieson and Talwalkar, AISTATS 2016.
"""

from __future__ import annotations

import itertools
from typing import Any

import parsl
import torch
import torch.nn.functional as F
from parsl.config import Config
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from parsl_freetrain import (
    BackfillProvider,
    Checkpoint,
    FragmentContext,
    FreeTrainExecutor,
    LocalSite,
    TrainingFuture,
    freetrain_app,
    load_weights,
)

GRID = [
    {'lr': lr, 'width': width, 'drop': drop}
    for lr, width, drop in itertools.product(
        (0.001, 0.003, 0.01, 0.03, 0.1), (16, 64, 128), (0.0, 0.3)
    )
]
ROUNDS = ((30, 1), (10, 3), (3, 9), (1, 27))
"""For each round, the number of settings and the number of epochs of each setting."""


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (n, 64) and labels: 1437 for training, 360 for comparing settings."""
    source = load_digits()
    x, y = torch.tensor(source.data, dtype=torch.float32) / 16, torch.tensor(source.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[360:]], y[order[360:]], x[order[:360]], y[order[:360]]


def train(
    ctx: FragmentContext,
    setting: dict[str, Any],
    data: tuple[Tensor, ...],
    before: Checkpoint | None = None,
) -> None:
    """Train one setting for one round, from the weights of the last round."""
    torch.manual_seed(0)
    x, y, held_x, held_y = data
    model = nn.Sequential(
        nn.Linear(64, setting['width']),
        nn.ReLU(),
        nn.Dropout(setting['drop']),
        nn.Linear(setting['width'], 10),
    )
    if before is not None:
        model.load_state_dict(load_weights(before))
    model, optimizer = ctx.prepare(
        model, torch.optim.SGD(model.parameters(), lr=setting['lr'], momentum=0.9)
    )
    for images, labels in ctx.loop(TensorDataset(x, y), batch_size=32):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        ctx.report(
            loss=F.cross_entropy(model(held_x), held_y).item(),
            accuracy=(model(held_x).argmax(1) == held_y).float().mean().item(),
        )


def main(config: Config) -> int:
    """Search, print each round and the winner."""
    data = digits()
    with parsl.load(config):
        left: list[tuple[dict[str, Any], TrainingFuture | None]] = [
            (setting, None) for setting in GRID
        ]
        for number, (settings, epochs) in enumerate(ROUNDS, 1):
            app = freetrain_app(min_nodes=1, max_nodes=1, total_epochs=epochs)(train)
            futures = [
                (setting, app(setting, data, before, trainer_name=f'{number}-{name_of(setting)}'))
                for setting, before in left[:settings]
            ]
            ranked = sorted(futures, key=lambda one: one[1].result().metrics['loss'])
            best, found = ranked[0][0], ranked[0][1].result().metrics
            print(
                f'round {number}: {len(futures)} settings, {epochs} epochs each; best '
                f'{name_of(best)} '
                f'with loss {found["loss"]:.4f}, accuracy {found["accuracy"]:.4f}',
                flush=True,
            )
            left = [*ranked]
    return 0


def name_of(setting: dict[str, Any]) -> str:
    """The name of the trainer with this setting."""
    return '-'.join(f'{key}{value}' for key, value in setting.items())


if __name__ == '__main__':
    site = LocalSite(nodes=4)
    executor = FreeTrainExecutor(provider=BackfillProvider(site=site), checkpoint_dir='checkpoints')
    main(Config(executors=[executor]))
