"""A small GPT whose parameters are divided among the nodes that it has, and divided anew whenever
they change; it learns Python's own manual, letter by letter.

``python -m workflows.gpt_sharded`` trains with FSDP2 on four, two or one nodes of this computer:
other trainers come and go, so its shape changes, and its ranks are killed on the way. Then it
trains the same network on one node, undisturbed, and compares the weights to the last bit. With
``--tensor``, layers are divided too on four nodes; then the weights are equal up to rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import parsl
import torch
import torch.nn.functional as F
from parsl.config import Config
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from parsl_freetrain import (
    BackfillProvider,
    BadInput,
    Checkpoint,
    Checkpoints,
    FreeTrainError,
    FreeTrainExecutor,
    LocalSite,
    Policy,
    Reproducible,
    Scaling,
    Shape,
    Throughput,
    TrainingFuture,
    freetrain_app,
    load_weights,
    same_weights,
)
from parsl_freetrain.cli.sites import provider_of
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.sites.protocols import Site
from workflows.chimera_gpt import corpus, loss_of
from workflows.command import output_folder, refuse_to_wait, result, set_aside
from workflows.divided import strike
from workflows.manual_text import Windows

if TYPE_CHECKING:
    from parsl_freetrain import FragmentContext

SHARDED, ALONE = 'sharded', 'alone'
SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}
WITH_TENSOR = {**SHAPES, 4: Shape(shard=2, tensor=2)}
# Assumed, so that the sharded trainer gives up two nodes for another trainer, and three for three.
SCALING = {1: 1.0, 2: 1.8, 4: 2.6}
VISITORS = {2: 1, 1: 3}
"""By the number of nodes that the sharded trainer is to have: how many others there are."""
HEAD_WIDTH = 8
ADVICE = 'use a longer schedule'


class Embedding(nn.Module):
    """Embeds letters and positions: (samples, length) to (samples, length, width)."""

    def __init__(self, letters: int, length: int, width: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.letter(x) + self.place(torch.arange(x.shape[1], device=x.device))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal attention, then a feed-forward network at each position. With tensor parallelism, each
    rank has some of the heads.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.within = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.join = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.before(x)
        query, key, value = (
            part(seen).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.within(x))))  # type: ignore[no-any-return]


PLAN = {
    **{f'*.{name}': ColwiseParallel() for name in ('query', 'key', 'value', 'up')},
    **{f'*.{name}': RowwiseParallel() for name in ('join', 'down')},
}


def network(letters: int, length: int, width: int, blocks: int) -> nn.Sequential:
    """The whole network."""
    return nn.Sequential(
        Embedding(letters, length, width),
        *(Block(width) for _ in range(blocks)),
        nn.LayerNorm(width),
        nn.Linear(width, letters),
    )


def train_gpt(
    ctx: FragmentContext, numbers: Tensor, model: dict[str, int], batch_size: int, hurry: str
) -> None:
    """Train; slowly until the file ``hurry`` exists, and more so in the second half, so that what
    is to happen meanwhile can happen on a slow machine too.
    """
    with torch.device('meta'):
        net: nn.Module = network(**model)
    net = ctx.shard(net, blocks=(Block,), plan=PLAN)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.05)
    net, optimizer = ctx.prepare(net, optimizer, clip_grad_norm=1.0)
    slept_at = -1
    for letters, following in ctx.loop(Windows(numbers, model['length']), batch_size):
        optimizer.zero_grad()
        loss = loss_of(net(letters), following)
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
        if ctx.samples != slept_at and not Path(hurry).exists():
            slept_at = ctx.samples
            half = ctx.samples > (ctx.total_samples or 0) / 2
            time.sleep(1.7 if half else 0.2)


def visit(ctx: FragmentContext) -> None:
    """Another user's training, which takes one node until it is cancelled."""
    net = nn.Linear(1, 1)
    net, optimizer = ctx.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for (x,) in ctx.loop(torch.utils.data.TensorDataset(torch.ones(8, 1)), 8):
        net(x).sum().backward()
        optimizer.step()
        time.sleep(0.05)


def train(out: Path, options: argparse.Namespace) -> tuple[dict[str, Checkpoint], dict[str, Any]]:
    """The final checkpoints of both trainings, and the summary."""
    text, _, letters = corpus()
    length, width, blocks, batch_size, steps = (
        (32, 32, 2, 8, 48) if options.small else (64, 128, 4, 32, 600)
    )
    model = {'letters': len(letters), 'length': length, 'width': width, 'blocks': blocks}
    shapes = WITH_TENSOR if options.tensor else SHAPES
    mode = Throughput() if options.tensor else Reproducible(shards=4)
    site = options.provider.site
    executor = FreeTrainExecutor(
        provider=options.provider,
        checkpoint_dir=str(out / 'checkpoints'),
        policy=Policy(metric='speedup', horizon_s=60),
        max_workers_per_node=0,
    )
    hurry = out / 'hurry'

    def submitted(name: str, most: int) -> TrainingFuture:
        app = freetrain_app(
            sizes=dict(shapes),
            max_nodes=most,
            total_samples=steps * batch_size,
            mode=mode,
            scaling=Scaling(rate=SCALING, rescale_up_s=0.5, rescale_down_s=0.5),
            checkpoints=Checkpoints(every_s=1.0),
        )(train_gpt)
        return app(text, model, batch_size, str(hurry), trainer_name=name)

    def visitor(number: int) -> TrainingFuture:
        app = freetrain_app(max_nodes=1, total_samples=10**9, scaling=Scaling(rate={1: 1.0}))
        return app(visit)(trainer_name=f'visitor-{number}')

    def reach(nodes: int) -> None:
        wait_for(lambda: sharded.progress().nodes == nodes, sharded, site)
        before = sharded.progress().samples
        wait_for(lambda: sharded.progress().samples > before, sharded, site)

    kills, most = 0, max(count for count in shapes if count <= options.nodes)
    with parsl.load(Config(executors=[executor], run_dir=str(out / 'runinfo'))):
        sharded = submitted(SHARDED, most)
        reach(most)
        visitors: list[TrainingFuture] = []
        for nodes, number in VISITORS.items():
            if nodes < most:
                strike(sharded, Path(executor.ledger_path), site)
                kills += 1
                visitors += [visitor(n) for n in range(len(visitors), number)]
                reach(nodes)
        for guest in visitors:
            guest.cancel()
        reach(most)
        hurry.touch()
        found = {SHARDED: result(sharded, site, ADVICE)}
        found[ALONE] = result(submitted(ALONE, 1), site, ADVICE)
    history = Journal(executor.ledger_path).history()
    fragments = [f for f in history.fragments if f.trainer == SHARDED]
    summary = {
        'weights_equal': same_weights(found[SHARDED], found[ALONE]),
        'shapes': [str(shapes[len(fragment.nodes)]) for fragment in fragments],
        'kills': kills,
        'writers': len(list(Path(found[SHARDED].path).glob('rank-*.safetensors'))),
        'samples': found[SHARDED].samples,
        'samples_expected': steps * batch_size,
    }
    return found, summary


def wait_for(condition: Callable[[], bool], future: TrainingFuture, site: Site) -> None:
    """Wait until a condition holds, or the training has ended."""
    while not condition() and not future.done():
        refuse_to_wait(future, site, ADVICE)
        time.sleep(0.05)


def largest_difference(one: Checkpoint, other: Checkpoint) -> float:
    """The largest difference of a weight between two checkpoints of one network."""
    first, second = load_weights(one), load_weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workflow; returns the exit status."""
    parser = argparse.ArgumentParser(prog='gpt_sharded', description=__doc__)
    parser.add_argument('--small', action='store_true', help='a small network: about a minute')
    parser.add_argument(
        '--tensor', action='store_true', help='tensor parallelism on four nodes; throughput mode'
    )
    parser.add_argument(
        '--site', metavar='NAME|FILE', help='a machine with a batch scheduler (default: this one)'
    )
    parser.add_argument(
        '--nodes', type=int, default=4, choices=(2, 4), help='maximum (default: %(default)s)'
    )
    parser.add_argument('--out', default='demo-out/gpt_sharded', help='default: %(default)s')
    options = parser.parse_args(arguments)
    out = Path(options.out).absolute()
    try:
        options.provider = (
            provider_of(options.site)
            if options.site
            else BackfillProvider(LocalSite(nodes=options.nodes, poll_s=0.25), min_hole_s=1.0)
        )
        output_folder(out)
        set_aside(out)
        found, summary = train(out, options)
    except FreeTrainError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
    (out / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n')
    print(json.dumps(summary, indent=2))
    print(f'Loss: {found[SHARDED].metrics["loss"]:.3f}')
    print(f'Largest difference of a weight: {largest_difference(*found.values()):.3g}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
