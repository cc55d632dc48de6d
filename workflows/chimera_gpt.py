"""A small GPT in bidirectional pipelines that learns Python's own manual, letter by letter.

``python -m workflows.chimera_gpt`` trains in the holes of this computer with the layers on one
node, or divided among two or four nodes in two pipelines of opposite directions; and, for
comparison, the same network on one node. The text is that of Python's ``help()``, which comes with
Python. The method is that of Li and Hoefler 2021 (Chimera, arXiv 2107.06925).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader

from parsl_freetrain import Shape, load_weights
from parsl_freetrain.training.parallel.pipeline import Pipeline
from workflows.divided import DIVIDED, WHOLE, losses, main_of, train
from workflows.manual_text import Windows, manual

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext

SHAPES = {1: Shape(), 2: Shape(pipeline=2), 4: Shape(pipeline=4)}
# Assumed for a machine with one core per node. Two stages and another trainer are better than four
# stages.
SCALING = {1: 1.0, 2: 1.8, 4: 2.7}
BLOCKS, HEADS = 6, 4
MICRO_BATCHES = 4


def corpus() -> tuple[Tensor, Tensor, str]:
    """The manual's letters as numbers for training and (the last twentieth) for testing; and the
    letters.
    """
    numbers, letters = manual()
    return numbers[: -len(numbers) // 20], numbers[-len(numbers) // 20 :], letters


class Embedding(nn.Module):
    """Embeds letters and positions: (samples, length) to (samples, length, width)."""

    def __init__(self, letters: int, length: int, width: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)
        for table in (self.letter, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.letter(x) + self.place(torch.arange(x.shape[1], device=x.device))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: causal attention, then a feed-forward network at each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.within = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.look(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.think(self.within(x))  # type: ignore[no-any-return]


def layers(letters: int, length: int, width: int) -> list[Callable[[], nn.Module]]:
    """Constructors of the eight layers."""
    return [
        partial(Embedding, letters, length, width),
        *[partial(Block, width)] * BLOCKS,
        lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters)),
    ]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """In nats per letter."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def train_gpt(
    ctx: FragmentContext,
    folder: str,
    numbers: Tensor,
    letters: int,
    length: int,
    width: int,
    batch_size: int,
) -> None:
    """Train this rank's stages; all ranks have the same samples."""
    model = Pipeline(
        layers(letters, length, width),
        loss_of,
        method='chimera',
        micro_batches=MICRO_BATCHES,
        group=ctx.mesh.get_group('pipeline'),
        seed=1,
        device=ctx.device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    total = float(ctx.total_samples or 1)
    schedule = ctx.samples_lr(
        optimizer,
        lambda samples: min(
            (samples + batch_size) / (20 * batch_size),
            0.55 + 0.45 * math.cos(math.pi * samples / total),
        ),
    )
    _, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    curve = ctx.state.setdefault('losses', [])
    for x, y in ctx.loop(Windows(numbers, length), batch_size):
        loss = model.step(x, y)
        optimizer.step()
        schedule.step()
        ctx.report(loss=loss.item())
        if ctx.samples // batch_size % 5 == 0:
            curve.append((ctx.samples, loss.item(), ctx.shape.pipeline))
    if ctx.is_main:
        Path(folder, f'{ctx.trainer}-losses.json').write_text(json.dumps(curve))


@torch.no_grad()
def tested(model: Pipeline, numbers: Tensor, length: int) -> float:
    """The loss on held-out text, in nats per letter."""
    batches = list(DataLoader(Windows(numbers, length), batch_size=64))
    return sum(loss_of(model(x), y).item() * len(x) for x, y in batches) / sum(
        len(x) for x, _ in batches
    )


@torch.no_grad()
def written(model: Pipeline, letters: str, length: int, prompt: str, count: int) -> str:
    """Continue a prompt, drawing each letter from the model's distribution."""
    drawn = torch.Generator().manual_seed(1)
    text = torch.tensor([[letters.index(letter) for letter in prompt]])
    for _ in range(count):
        likely = (model(text[:, -length:])[0, -1] / 0.7).softmax(0)
        text = torch.cat([text, torch.multinomial(likely, 1, generator=drawn)[None]], 1)
    return ''.join(letters[number] for number in text[0])


def run(out: Path, options: argparse.Namespace) -> None:
    """Train, test on held-out text, generate text, draw the charts."""
    length, width, batch_size, steps = (32, 32, 16, 200) if options.small else (64, 96, 32, 500)
    text, held, letters = corpus()
    settings = {
        'folder': str(out),
        'numbers': text,
        'letters': len(letters),
        'length': length,
        'width': width,
        'batch_size': batch_size,
    }
    checkpoints = train(train_gpt, settings, steps * batch_size, out, options, SHAPES, SCALING)
    found: dict[str, Any] = {'length': length, 'width': width, 'losses': losses(out)}
    model = Pipeline(layers(len(letters), length, width), loss_of)
    for name in (DIVIDED, WHOLE):
        model.load_state_dict(load_weights(checkpoints[name]))
        found[name] = {
            'tested': tested(model, held, length),
            'written': written(model, letters, length, 'The ', 6 * length),
        }
        print(f'{name}: {found[name]["tested"]:.3f} nats per letter on text not trained on')
    print(found[DIVIDED]['written'])
    (out / 'found.json').write_text(json.dumps(found) + '\n')
    draw(found, out / 'chimera_gpt.png')
    print(f'Picture: {out / "chimera_gpt.png"}')


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw both loss curves; that of the divided trainer by number of stages."""
    figure = Figure(figsize=(8, 3.2), layout='constrained')
    axis = figure.subplots()
    for stages, color in zip((1, 2, 4), ('#d95f02', '#1b9e77', '#7570b3'), strict=True):
        points = [
            (samples, loss) for samples, loss, had in found['losses'][DIVIDED] if had == stages
        ]
        if points:
            axis.plot(
                *zip(*points, strict=True),
                '.',
                markersize=5,
                color=color,
                label=f'divided, {stages} stage{"s" * (stages > 1)}',
            )
    axis.plot(
        *zip(*((samples, loss) for samples, loss, _ in found['losses'][WHOLE]), strict=True),
        color='black',
        linewidth=0.7,
        label='whole, on one node',
    )
    axis.set(xlabel='samples', ylabel='loss in nats per letter')
    axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow; returns the exit status."""
    return main_of('chimera_gpt', run, arguments)


if __name__ == '__main__':
    sys.exit(main())
