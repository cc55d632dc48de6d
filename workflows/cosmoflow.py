"""CosmoFlow: a network that is divided among nodes estimates the strength and roughness of
three-dimensional fields.

``python -m workflows.cosmoflow`` makes random fields of known spectrum, trains on them in the holes
of this computer with every field divided in space, and compares with the same network on one node.
The network is that of Mathuriya et al. 2018 (arXiv 1808.04728) in small, the method that of Oyama
et al. 2020 (arXiv 2007.12856).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from parsl_freetrain import load_weights
from parsl_freetrain.training.parallel.spatial import Grid, Sharded, check_division
from workflows.cosmoflow_model import CosmoFlow, train_cosmoflow
from workflows.divided import DIVIDED, SHAPES, WHOLE, draw_losses, losses, main_of, train

SIGMA, SLOPE = (0.7, 1.3), (-3.0, -1.0)
"""Ranges from which a field's standard deviation and the slope of its spectrum are drawn."""


def random_fields(
    count: int, extent: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Gaussian random fields on a periodic cube, with power k^slope at wave number k.

    Returns
    -------
    fields
        (count, 1, extent, extent, extent); the expected variance of a voxel is sigma squared.
    targets
        (count, 2): sigma and slope, each scaled from its range to -1..1.
    """
    random = np.random.default_rng(seed)
    waves = np.fft.fftfreq(extent, 1 / extent)
    k = np.sqrt(waves[:, None, None] ** 2 + waves[None, :, None] ** 2 + waves[None, None, :] ** 2)
    k[0, 0, 0] = 1
    fields, targets = (
        np.empty((count, 1, extent, extent, extent), np.float32),
        random.uniform(-1, 1, (count, 2)).astype(np.float32),
    )
    for field, target in zip(fields, targets, strict=True):
        sigma, slope = (
            low + (t + 1) / 2 * (high - low)
            for t, (low, high) in zip(target, (SIGMA, SLOPE), strict=True)
        )
        power = k**slope
        power[0, 0, 0] = 0  # the mean of a field is 0
        modes = np.fft.fftn(random.standard_normal((extent, extent, extent)))
        field[0] = np.fft.ifftn(modes * sigma * np.sqrt(power / power.mean())).real
    return fields, targets


def predicted(weights: dict[str, Tensor], fields: NDArray[np.float32]) -> Tensor:
    """The outputs of a trained network, undivided in this process: (fields, 2)."""
    extent = fields.shape[-1]
    model = CosmoFlow(extent)
    model.load_state_dict(weights)
    with torch.no_grad():
        return torch.cat(
            [
                model(Sharded.of(torch.from_numpy(field[None]), (extent,) * 3, Grid()))
                for field in fields
            ]
        )


def run(out: Path, options: argparse.Namespace) -> None:
    """Generate fields, train, compare on held-out fields, draw the charts."""
    extent, count, epochs = (16, 96, 24) if options.small else (32, 160, 30)
    for shape in SHAPES.values():
        check_division(CosmoFlow(extent), 1, (extent,) * 3, shape.spatial)
    fields, targets = random_fields(count, extent, seed=1)
    np.save(out / 'fields.npy', fields)
    np.save(out / 'targets.npy', targets)
    checkpoints = train(
        train_cosmoflow, {'folder': str(out), 'extent': extent}, epochs * count, out, options
    )
    held, truth = random_fields(64, extent, seed=2)
    found: dict[str, Any] = {'extent': extent, 'truth': truth.tolist(), 'losses': losses(out)}
    for name in (DIVIDED, WHOLE):
        said = predicted(load_weights(checkpoints[name]), held).numpy()
        explained = 1 - ((said - truth) ** 2).mean(0) / truth.var(0)
        found[name] = {'said': said.tolist(), 'explained': explained.tolist()}
        print(
            f'{name}: explains {explained[0]:.3f} of the variance of sigma, '
            f'{explained[1]:.3f} of that of the slope'
        )
    (out / 'found.json').write_text(json.dumps(found) + '\n')
    draw(found, out / 'cosmoflow.png')
    print(f'Picture: {out / "cosmoflow.png"}')


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw both loss curves, and predictions against the truth on held-out fields."""
    figure = Figure(figsize=(10, 3.2), layout='constrained')
    curve, *axes = figure.subplots(1, 3)
    draw_losses(curve, found['losses'])
    truth = np.array(found['truth'])
    for i, (axis, name, (low, high)) in enumerate(
        zip(axes, ('sigma', 'slope of the spectrum'), (SIGMA, SLOPE), strict=True)
    ):
        for trainer, mark in ((DIVIDED, 'o'), (WHOLE, 'x')):
            said = np.array(found[trainer]['said'])
            axis.plot(
                *(low + (values[:, i] + 1) / 2 * (high - low) for values in (truth, said)),
                mark,
                markersize=4,
                label=trainer,
            )
        axis.plot((low, high), (low, high), color='grey', linewidth=0.8)
        axis.set(xlabel=f'true {name}', ylabel='predicted of fields not trained on')
        axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow; returns the exit status."""
    return main_of('cosmoflow', run, arguments)


if __name__ == '__main__':
    sys.exit(main())
