"""A 3D U-Net that segments grey and white matter in the average brain; every crop of the volume is
divided among nodes.

``python -m workflows.unet3d`` takes the MNI ICBM152 template and its tissue maps from the installed
package nilearn, trains on the back of the head in the holes of this computer, and scores the
network on the front. The network is that of Cicek et al. 2016 (arXiv 1606.06650) in small, the
method that of Oyama et al. 2020 (arXiv 2007.12856).
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

from parsl_freetrain import load_weights
from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.training.parallel.spatial import Grid, Sharded, check_division
from workflows.divided import DIVIDED, SHAPES, WHOLE, draw_losses, losses, main_of, train
from workflows.unet3d_model import TISSUES, UNet, train_unet

FRONT = 0.6
"""Start of the held-out part, as a share of the way from the back of the head to the front."""


def brain(resolution_mm: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """The template, 0 to 1, and the most likely tissue of each voxel: both (1, 1, left-right,
    back-front, up).

    Raises
    ------
    BadInput
        If nilearn is not installed.
    """
    with needs('The brain'):
        from nilearn import datasets
    template, grey, white = (
        np.asarray(load(resolution=resolution_mm).get_fdata(), np.float32)
        for load in (
            datasets.load_mni152_template,
            datasets.load_mni152_gm_template,
            datasets.load_mni152_wm_template,
        )
    )
    labels = np.where(np.maximum(grey, white) < 0.5, 0, np.where(grey >= white, 1, 2)).astype(
        np.uint8
    )
    return template[None, None], labels[None, None]


def run(out: Path, options: argparse.Namespace) -> None:
    """Write the volumes, train, segment the front of the head, draw the charts."""
    resolution, crop, count, epochs = (4, 16, 64, 9) if options.small else (3, 24, 128, 12)
    template, labels = brain(resolution)
    front = round(FRONT * template.shape[3])
    random = np.random.default_rng(1)
    limits = (template.shape[2], front, template.shape[4])
    corners = [
        (0, *(int(random.integers(limit - crop + 1)) for limit in limits)) for _ in range(count)
    ]
    for shape in SHAPES.values():
        check_division(UNet(), 1, (crop,) * 3, shape.spatial)
    np.save(out / 'template.npy', template)
    np.save(out / 'labels.npy', labels)
    settings = {'folder': str(out), 'crop': crop, 'corners': corners, 'front': front}
    checkpoints = train(train_unet, settings, epochs * count, out, options)
    model = UNet()
    model.load_state_dict(load_weights(checkpoints[DIVIDED]))
    rest = torch.from_numpy(template[:, :, :, front:])
    with torch.no_grad():
        found = (
            model.eval()(Sharded.of(rest, (rest.shape[2], rest.shape[3], rest.shape[4]), Grid()))
            .local.argmax(1)[0]
            .numpy()
        )
    height = found.shape[2] // 2
    result: dict[str, Any] = {
        'dice': {
            name: {tissue: checkpoints[name].metrics[f'dice_{tissue}'] for tissue in TISSUES[1:]}
            for name in (DIVIDED, WHOLE)
        },
        'losses': losses(out),
        'found': [''.join(map(str, row)) for row in found[:, :, height].tolist()],
    }
    for name, scores in result['dice'].items():
        print(
            f'{name}: Dice {scores["grey"]:.3f} for grey matter, {scores["white"]:.3f} '
            'for white matter, in the front of the head'
        )
    (out / 'found.json').write_text(json.dumps(result) + '\n')
    truth = labels[0, 0, :, front:, height]
    draw(
        result, out / 'unet3d.png', {'template': template[0, 0, :, front:, height], 'truth': truth}
    )
    print(f'Picture: {out / "unet3d.png"}')


def draw(
    result: dict[str, Any], picture: Path, beside: dict[str, NDArray[Any]] | None = None
) -> None:
    """Draw both loss curves, the scores, and a slice of the front of the head: the found tissues
    beside other images.
    """
    found = np.array([[int(label) for label in row] for row in result['found']])
    slices = {**(beside or {}), 'found': found}
    figure = Figure(figsize=(6 + 2.2 * len(slices), 3), layout='constrained')
    curve, scores, *axes = figure.subplots(1, 2 + len(slices))
    draw_losses(curve, result['losses'])
    for i, (name, of) in enumerate(result['dice'].items()):
        scores.bar([n + 0.4 * i for n in range(len(of))], list(of.values()), width=0.35, label=name)
    scores.set(xticks=[0.2, 1.2], xticklabels=list(TISSUES[1:]), ylabel='Dice', ylim=(0, 1))
    for axis, (name, values) in zip(axes, slices.items(), strict=True):
        axis.imshow(values.T, origin='lower', cmap='gray')
        axis.set(title=name, xticks=[], yticks=[])
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow; returns the exit status."""
    return main_of('unet3d', run, arguments)


if __name__ == '__main__':
    sys.exit(main())
