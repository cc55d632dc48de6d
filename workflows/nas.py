"""A search over architectures: depth, width, kind of layer and activation of a network for digits,
with asynchronous successive halving.

``freetrain run workflows/nas.py --site local``, or ``python -m workflows.nas`` for four slots of
this computer. Every architecture is one trainer. After 1, 3 and 9 epochs, those that are not in the
best third are stopped, and others get their nodes. It needs the extra ``optuna``.
"""

from __future__ import annotations

from typing import Any

import parsl
import torch
import torch.nn.functional as F
from parsl.config import Config
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, Tuned, freetrain_app, tune
from site_configs import laptop
from workflows.hpo import digits

SPACE = {
    'kind': ('dense', 'convolution'),
    'layers': (1, 2, 3),
    'width': (8, 16, 32),
    'activation': ('ReLU', 'GELU', 'Tanh'),
    'normalise': (False, True),
}


def network(setting: dict[str, Any]) -> nn.Module:
    """A network for images of 8 x 8 (batch, 64), with 10 classes."""
    convolves, width = setting['kind'] == 'convolution', setting['width']
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))] if convolves else []
    inputs = 1 if convolves else 64
    for _ in range(setting['layers']):
        if convolves:
            layers.append(nn.Conv2d(inputs, width, 3, padding=1))
        else:
            layers.append(nn.Linear(inputs, width))
        if setting['normalise']:
            layers.append(nn.BatchNorm2d(width) if convolves else nn.BatchNorm1d(width))
        layers.append(getattr(nn, setting['activation'])())
        inputs = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 64 if convolves else width, 10))


def train(ctx: FragmentContext, setting: dict[str, Any], data: tuple[Tensor, ...]) -> None:
    """Train one architecture; report its accuracy on images that it has not seen."""
    torch.manual_seed(0)
    x, y, held_x, held_y = data
    model = network(setting)
    model, optimizer = ctx.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.003))
    held_out = TensorDataset(held_x, held_y)

    def measure(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {'accuracy': model(batch[0]).argmax(1) == batch[1]}

    ctx.each_epoch(lambda: ctx.report(**ctx.evaluate(model, held_out, measure, batch_size=120)))
    for images, labels in ctx.loop(TensorDataset(x, y), batch_size=32):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main(config: Config, trials: int = 27, epochs: int = 27) -> Tuned:
    """Search, and print the best architectures."""
    app = freetrain_app(min_nodes=1, max_nodes=1, total_epochs=epochs)(train)
    with parsl.load(config):
        found = tune(app, SPACE, digits(), metric='accuracy', mode='max', trials=trials)
    measured = [trial for trial in found.trials if trial.values]
    for trial in sorted(measured, key=lambda trial: max(trial.values), reverse=True):
        epoch = max(trial.values)
        print(f'{epoch} epochs, accuracy {trial.values[epoch]:.3f}: {trial.setting}')
    print(f'best: {found.best.setting}, accuracy {found.best.values[epochs]:.3f}', flush=True)
    return found


if __name__ == '__main__':
    main(laptop.config(nodes=4))
