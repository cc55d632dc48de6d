"""Flood-filling networks: a network follows tubes through a volume. Its training gives the same
result on any number of nodes.

``python -m workflows.ffn`` generates volumes of tubes, trains in the holes of this computer and
again on one node, compares the weights bit by bit, and then follows the tubes of a held-out volume.
The network is that of Januszewski et al. 2018, the training that of Dong et al. 2019 (arXiv
1905.06236): synchronous and data-parallel, with a learning rate that may grow with the nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from parsl_freetrain import Ranks, Reproducible, Scaled, Shape, load_weights, same_weights
from workflows.divided import DIVIDED, WHOLE, draw_losses, losses, main_of, train
from workflows.ffn_flood import overlaps, segmented, segmented_by_brightness
from workflows.ffn_network import FFN, Examples, View, centres_in, follow
from workflows.tubes import tubes

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext

SHAPES = {nodes: Shape(data=nodes) for nodes in (1, 2, 3, 4)}
SCALING = {1: 1.0, 2: 1.9, 3: 2.7, 4: 3.4}  # assumed for a machine with one core per node


@dataclass(frozen=True)
class Preset:
    """Sizes of volumes, network and training.

    Attributes
    ----------
    extent, tubes, radius, noise
        Of a volume; see :func:`workflows.tubes.tubes`.
    volumes
        Number of volumes to train on.
    view, channels, depth
        Of the network.
    examples, epochs, batch, lr
        Of the training. ``batch`` is the number of examples on all nodes; the learning rate falls
        linearly to 5 %.
    """

    extent: int
    tubes: int
    radius: float
    noise: float
    volumes: int
    view: View
    channels: int
    depth: int
    examples: int
    epochs: int
    batch: int
    lr: float

    def volume(self, seed: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """One volume: image and labels."""
        return tubes(self.extent, self.tubes, self.radius, seed, noise=self.noise)


USUAL = Preset(
    extent=56,
    tubes=4,
    radius=4,
    noise=0.2,
    volumes=3,
    view=View(13, 4, 8),
    channels=8,
    depth=5,
    examples=512,
    epochs=4,
    batch=8,
    lr=3e-3,
)
SMALL = replace(
    USUAL, extent=48, radius=3, volumes=2, view=View(11, 3, 4), examples=128, epochs=3, batch=4
)
PAPER = replace(
    USUAL, extent=128, tubes=9, radius=7, view=View(33, 8, 26), channels=32, depth=12, batch=4
)
"""The field of view, the moves and the network of Dong et al.; for nodes with many
cores or GPUs.
"""


def train_ffn(
    ctx: FragmentContext, folder: str, preset: Preset, centres: list[tuple[int, int, int, int]]
) -> None:
    """Train: each rank follows the objects of the examples in its part of each batch."""
    images, labels = (
        torch.from_numpy(np.load(f'{folder}/{name}.npy', allow_pickle=False))
        for name in ('images', 'labels')
    )
    examples = Examples(images, labels, centres, preset.view)
    torch.manual_seed(1)
    model = FFN(preset.channels, preset.depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=preset.lr)
    end = preset.epochs * preset.examples
    scheduler = ctx.samples_lr(optimizer, lambda samples: max(0.05, 1 - samples / end))
    model, optimizer, scheduler = ctx.prepare(model, optimizer, scheduler)
    curve, recent, at = ctx.state.setdefault('losses', []), ctx.state.setdefault('recent', []), -1

    def note_mean() -> None:
        if ctx.is_main:
            curve.append((ctx.samples, sum(recent) / len(recent)))
            recent.clear()

    ctx.each_epoch(note_mean)
    for image, target, offsets in ctx.loop(examples, preset.batch):
        optimizer.zero_grad()
        loss, places = follow(model, image, target, offsets, preset.view)
        loss.backward()
        optimizer.step()
        scheduler.step()
        ctx.report(loss=loss.item(), places=places / len(image))
        # The batch's first iteration: rank 0 has the same samples in it on any number of nodes.
        if ctx.is_main and ctx.samples != at:
            at = ctx.samples
            recent.append(loss.item())
    if ctx.is_main:
        Path(folder, f'{ctx.trainer}-losses.json').write_text(json.dumps(curve))


def trained(weights: dict[str, Tensor], preset: Preset) -> FFN:
    """The network with these weights."""
    model = FFN(preset.channels, preset.depth)
    model.load_state_dict(weights)
    return model


def run(out: Path, options: argparse.Namespace) -> None:
    """Generate volumes, train, follow the tubes of a held-out volume, draw the charts."""
    preset = chosen(options)
    volumes = [preset.volume(seed) for seed in range(preset.volumes)]
    images, labels = (np.stack(parts) for parts in zip(*volumes, strict=True))
    centres = centres_in(torch.from_numpy(labels), preset.examples, preset.view, seed=1)
    Examples(
        torch.from_numpy(images), torch.from_numpy(labels), centres, preset.view
    )  # raises BadInput if the sizes do not fit
    np.save(out / 'images.npy', images)
    np.save(out / 'labels.npy', labels)
    mode: Reproducible | Scaled = Reproducible(shards=2 if options.small else 4)  # one per node
    if options.scaled:
        mode = Scaled(lr=options.scaled, warmup_samples=preset.examples)
    checkpoints = train(
        train_ffn,
        {'folder': str(out), 'preset': preset, 'centres': centres},
        preset.epochs * preset.examples,
        out,
        options,
        SHAPES,
        SCALING,
        ranks=Ranks(threads=options.threads),
        mode=mode,
    )
    image, truth = preset.volume(seed=1000)
    same = same_weights(checkpoints[DIVIDED], checkpoints[WHOLE])
    found = {
        name: segmented(
            trained(load_weights(checkpoints[name]), preset), torch.from_numpy(image), preset.view
        )
        for name in ((DIVIDED,) if same else (DIVIDED, WHOLE))
    }
    scores = {name: overlaps(objects, truth) for name, objects in found.items()}
    result: dict[str, Any] = {
        'preset': asdict(preset),
        'weights_equal': same,
        'iou': scores | ({WHOLE: scores[DIVIDED]} if same else {}),
        'iou_by_brightness': overlaps(
            segmented_by_brightness(torch.from_numpy(image), truth), truth
        ),
        'losses': losses(out),
        'slices': slices(image, truth, found[DIVIDED]),
    }
    (out / 'found.json').write_text(json.dumps(result) + '\n')
    told = {
        name: f'{np.mean(values):.3f} (worst {min(values):.3f})'
        for name, values in result['iou'].items()
    }
    print(
        f'weights {"equal" if same else "not equal"}; intersection over union, mean of '
        f'{len(scores[DIVIDED])} tubes: '
        f'{DIVIDED} {told[DIVIDED]}, {WHOLE} {told[WHOLE]}, by brightness '
        f'{np.mean(result["iou_by_brightness"]):.3f}'
    )
    draw(result, out / 'ffn.png')
    print(f'Picture: {out / "ffn.png"}')


def chosen(options: argparse.Namespace) -> Preset:
    """The preset that the options name, with their changes.

    Raises
    ------
    BadInput
        If a field of view or a move is impossible.
    """
    preset = SMALL if options.small else PAPER if options.paper else USUAL
    changes = {
        field: value
        for field in ('extent', 'delta', 'moves')
        if (value := getattr(options, field)) is not None
    }
    return replace(
        preset,
        view=View(**{**asdict(preset.view), **changes}),
        **({'extent': options.volume} if options.volume else {}),
    )


def slices(
    image: NDArray[np.float32], truth: NDArray[np.uint8], found: NDArray[np.int32]
) -> dict[str, list[list[int]]]:
    """The plane with the largest area of tubes. A found object gets the number of the tube that it
    fits best.
    """
    areas = np.array([(truth > 0).sum(tuple({0, 1, 2} - {axis})) for axis in range(3)])
    axis, at = (int(i) for i in np.unravel_index(areas.argmax(), areas.shape))
    renumbered = np.zeros_like(found)
    for number in range(1, int(found.max()) + 1):
        inside = truth[found == number]
        renumbered[found == number] = (
            np.bincount(inside).argmax() if inside.any() else truth.max() + 1
        )
    seen, true, made = (volume.take(at, axis) for volume in (image, truth, renumbered))
    return {
        'image': np.clip((seen + 2) * 50, 0, 255).astype(int).tolist(),
        'truth': true.tolist(),
        'found': made.tolist(),
    }


def draw(result: dict[str, Any], picture: Path) -> None:
    """Draw both loss curves, and a slice of a held-out volume: the image, the truth and the found
    objects.
    """
    figure = Figure(figsize=(12, 3), layout='constrained')
    curve, *axes = figure.subplots(1, 4)
    draw_losses(curve, result['losses'])
    for axis, (name, values) in zip(axes, result['slices'].items(), strict=True):
        shown = np.array(values)
        if name == 'image':
            axis.imshow(shown, cmap='gray')
        else:
            axis.imshow(
                np.ma.masked_equal(shown, 0), cmap='tab20', vmin=1, vmax=20, interpolation='nearest'
            )
            axis.set_facecolor('black')
        axis.set(title=name, xticks=[], yticks=[])
    figure.savefig(picture, dpi=110)


def more_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that other workflows do not have."""
    parser.add_argument(
        '--paper',
        action='store_true',
        help='the field of view and the network of Dong et al. 2019; not for a laptop',
    )
    parser.add_argument(
        '--fov', dest='extent', type=int, metavar='VOXELS', help='edge of the field of view, odd'
    )
    parser.add_argument('--delta', type=int, metavar='VOXELS', help='of a move')
    parser.add_argument('--moves', type=int, help='that are tried with each example')
    parser.add_argument('--volume', type=int, metavar='VOXELS', help='edge of the volumes')
    parser.add_argument(
        '--threads', type=int, default=1, help='of each rank; all cores of a node (default: 1)'
    )
    parser.add_argument(
        '--scaled',
        choices=('linear', 'sqrt'),
        help=(
            'a batch that grows with the nodes, and a learning rate that grows like '
            'this; weights then depend on the nodes'
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow; returns the exit status."""
    return main_of('ffn', run, arguments, more_options)


if __name__ == '__main__':
    sys.exit(main())
