"""Strikes a sharded training, in another shape each time, and compares its weights with those of an
undisturbed run: ``python -m tests.chaos.sharded --faults 100 --seed 1``.
"""

import argparse
import contextlib
import errno
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.testing import Fault, disk_full_at, kill_at, with_faults
from parsl_freetrain.training.checkpoint.export import same_weights
from parsl_freetrain.training.checkpoint.fault_hooks import SAVING_STAGES
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support import file_system_shim as fs
from tests.support import template
from tests.support.faults import kill_between
from tests.support.ranks import order, ranks, running_fork_server

SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}
DRAWN = (*SHAPES.values(), Shape(data=2, shard=2))
BATCH, SIZE = 8, 64
TROUBLES = [
    (fs.ALL, errno.EIO), (fs.WRITE | fs.SYNC, errno.ENOSPC), (fs.OPEN | fs.READ, errno.ESTALE),
    (fs.NAMES, errno.EACCES), (fs.READ | fs.WRITE, 0),
]  # fmt: skip


class Broken(AssertionError):
    """A promise was not kept."""


def train(ctx: FragmentContext) -> None:
    """A small network with dropout and clipping."""
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(
            nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 1)
        )
    model = ctx.shard(model, blocks=(nn.Linear,))
    model, optimizer = ctx.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), clip_grad_norm=0.5
    )
    x = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(5))
    for features, target in ctx.loop(TensorDataset(x, x.sum(1, keepdim=True)), BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(features), target).backward()
        optimizer.step()


def next_fault(draw: random.Random, world_size: int, fragment: int, step: int) -> tuple[str, Fault]:
    """What breaks from within, and what it is called."""
    rank = draw.randrange(world_size)
    saves = draw.randrange(1, 4)
    what = draw.choice(('step', 'stage', 'stage', 'disk'))
    if what == 'step':
        return what, kill_at(rank, step + draw.randrange(1, 6), fragment=fragment)
    if what == 'disk':
        return what, disk_full_at(100, rank=rank, checkpoint=saves, fragment=fragment)
    stage = draw.choice(SAVING_STAGES[: 4 if rank else -1])
    return f'{stage} {"of rank 0" if not rank else "of another"}', kill_between(
        stage, 'committed', rank=rank, checkpoint=saves, fragment=fragment
    )


def damage(store: PosixCheckpointStore, draw: random.Random) -> str:
    """Break the newest checkpoint, if there is one before it; returns what was done."""
    found = store.checkpoints()
    if len(found) < 2:
        return ''
    file = draw.choice(sorted(Path(found[-1].path).glob('rank-*.safetensors')))
    if draw.random() < 0.5:
        file.unlink()
        return 'lost part'
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return 'flipped bit'


@contextlib.contextmanager
def trouble(shim: fs.Shim | None, draw: random.Random) -> Iterator[str]:
    """After a while, and for a while, calls on files of the trainer fail, or move too little."""
    if shim is None or draw.random() < 0.5:
        yield ''
        return
    calls, error = draw.choice(TROUBLES)
    share, over = draw.choice((0.05, 0.5, 1.0)), threading.Event()
    wait_s, lasts_s = draw.uniform(0.5, 3.0), draw.uniform(0.1, 1.0)

    def cause() -> None:
        if not over.wait(wait_s):
            with shim.trouble(calls, error, '/store/', share):
                over.wait(lasts_s)

    thread = threading.Thread(target=cause)
    thread.start()
    try:
        yield f'{errno.errorcode.get(error, "short")} meanwhile'
    finally:
        over.set()
        thread.join()


def run(
    fork_server: ForkClient,
    folder: Path,
    number: int,
    shape: Shape,
    samples: int,
    function: Callable[..., Any],
    every_s: float,
) -> list[Any]:
    how: dict[str, Any] = {'shape': shape, 'shapes': SHAPES, 'checkpoint_every_s': every_s}
    ordered = order(folder, number, total_samples=samples, **how)
    with ranks(fork_server, ordered, shape.ranks, folder, function) as gang:
        return gang.run()


def chaos(
    fork_server: ForkClient,
    folder: Path,
    faults: int,
    seed: int,
    say: Callable[[str], None],
    shim: fs.Shim | None = None,
) -> Counter[str]:
    """Strike so often, train to the end, compare; Broken if it stopped, or weights differ."""
    draw, counts, number = random.Random(seed), Counter[str](), 0
    store = PosixCheckpointStore(folder / 'struck' / 'store', 'digits')
    reached = 0
    while counts.total() < faults:
        number += 1
        shape = draw.choice(DRAWN)
        what, injected = next_fault(draw, shape.ranks, number, reached // BATCH)
        strike = partial(run, fork_server, folder / 'struck', number, shape, 10**7)
        with trouble(shim, draw) as fails:
            outcomes = strike(with_faults(train, injected), 1e-9)
        counts.update([fails] if fails else [])
        if any(outcome.how in ('finished', 'fenced') for outcome in outcomes):
            raise Broken(f'fragment {number}: {what} on {shape} ended with {outcomes}')
        counts[what] += 1
        if draw.random() < 0.2 and (done := damage(store, draw)):
            counts[done] += 1
        newest = store.newest()
        reached = newest.samples if newest is not None else 0
        if counts.total() % 20 == 0:
            say(f'{counts.total()} faults, {number} fragments, {reached} samples')
    total = reached + 4 * BATCH
    for _ in range(3):  # a fragment that finds damage leaves it to the next one
        number += 1
        outcomes = run(fork_server, folder / 'struck', number, SHAPES[2], total, train, 3600.0)
        if all(outcome.how == 'finished' for outcome in outcomes):
            break
    else:
        raise Broken(f'the last fragments ended with {outcomes}')
    alone = run(fork_server, folder / 'alone', 1, SHAPES[1], total, train, 3600.0)
    if not same_weights(outcomes[0].path, alone[0].path):
        raise Broken('the weights differ from those of the undisturbed run')
    say(f'{number} fragments, {total} samples, faults: {dict(counts)}; the weights are equal.')
    return counts


def main() -> None:
    """As the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--faults', type=int, default=100)
    parser.add_argument('--seed', type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix='freetrain-chaos-') as temporary:
        folder = Path(temporary)
        shim = fs.Shim(folder) if fs.compiler() else None
        os.environ.update(shim.environment if shim else {})
        with template.shared(folder / 'template.log'), running_fork_server(folder) as fork_server:
            say = partial(print, flush=True)
            chaos(fork_server, folder, given.faults, given.seed, say, shim)


if __name__ == '__main__':
    main()
