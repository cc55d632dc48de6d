"""What the start of a fragment consists of, beside torchrun's, and what a rescale costs."""

from __future__ import annotations

import importlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import parsl_freetrain as ft
from parsl_freetrain.executor.fragment.members import Members
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.benchmarks.workload import BATCH, MACHINE, data, network, optimizer_of, under_torchrun
from tests.support.ranks import Ranks, order, running_fork_server
from tests.support.training import freetrain

ROUNDS = 3
PARTS = ('process', 'rendezvous', 'restore', 'first step')


class Timed:
    """When the function is unpickled the rank is there; then it notes when it meets the others."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def __reduce__(self) -> tuple[Callable[[], Timed], tuple[()]]:
        return timing, ()


def timing() -> Timed:
    rank: Any = importlib.import_module('parsl_freetrain.training.loop.rank')
    noted = Timed()
    noted.times['process'] = time.time()
    join = rank.join

    def joined(*args: Any) -> Any:
        meet = join(*args)

        def met() -> Any:
            peers = meet()
            noted.times['rendezvous'] = time.time()
            return peers

        return met

    rank.join = joined
    return noted


def restored(ctx: ft.FragmentContext, noted: Timed) -> None:
    model = network()
    optimizer = optimizer_of(model)
    model, optimizer = ctx.prepare(model, optimizer)
    for x, y in ctx.loop(TensorDataset(*data()), batch_size=BATCH):
        noted.times.setdefault('restore', time.time())
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if 'first step' not in noted.times:
            noted.times['first step'] = time.time()
            ctx.report(**noted.times)


def parts(began: float, every: list[dict[str, float]]) -> list[float]:
    """Seconds of each part, and of all, where each ends when the last rank is through."""
    ends = [began, *(max(times[part] for times in every) for part in PARTS)]
    return [*(end - start for start, end in pairwise(ends)), ends[-1] - began]


def warm_start(parent: ForkClient, folder: Path, fragment: int, ranks: int) -> list[float]:
    ordered = order(folder, fragment, total_samples=fragment * BATCH, mode='throughput')
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    began = time.time()
    gang = Ranks(parent, ordered, ranks, folder / str(fragment), restored, Timed())
    try:
        return parts(began, [outcome.metrics for outcome in gang.run()])
    finally:
        gang.close()


def cold_start(ranks: int, checkpoint: Path) -> list[float]:
    began = time.time()
    return parts(began, under_torchrun(ranks, 'cold_start', checkpoint))


def test_of_what_a_start_consists(tmp_path: Path) -> None:
    model = network()
    optimizer = optimizer_of(model)
    nn.functional.cross_entropy(model(data()[0][:8]), data()[1][:8]).backward()
    optimizer.step()
    torch.save(
        {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, tmp_path / 'plain.pt'
    )
    with running_fork_server(tmp_path) as parent:
        print(f'\nA start with a restored state, s, median of {ROUNDS} in turns ({MACHINE})')
        print(f'  {"ranks":5} {"":9} ' + ' '.join(f'{part:>10}' for part in (*PARTS, 'all')))
        for ranks in (1, 4):
            folder = tmp_path / str(ranks)
            warm_start(parent, folder, 1, ranks)  # which has nothing to restore
            turns = [
                (warm_start(parent, folder, i + 2, ranks), cold_start(ranks, tmp_path / 'plain.pt'))
                for i in range(ROUNDS)
            ]
            for name, found in zip(('fragment', 'torchrun'), zip(*turns, strict=True), strict=True):
                print(
                    f'  {ranks:5} {name:9} '
                    + ' '.join(
                        f'{statistics.median(column):10.3f}' for column in zip(*found, strict=True)
                    )
                )


def loads(ctx: ft.FragmentContext, load_s: float, width: int, sharded: bool = False) -> None:
    time.sleep(load_s)  # as a data set that is read
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(25)))
    if sharded:
        model = ctx.shard(model, blocks=(nn.Linear,))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = ctx.prepare(model, optimizer)
    x = torch.randn(64, width, generator=torch.Generator().manual_seed(5))
    for (batch,) in ctx.loop(TensorDataset(x), batch_size=4):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ('width', 'size', 'sizes'),
    [
        (64, '0.8 MB', (1, 2)),
        (1024, '210 MB', (1, 2)),
        (1024, '210 MB, sharded', {1: ft.Shape(), 2: ft.Shape(shard=2)}),
    ],
)
def test_what_a_rescale_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, size: str, sizes: Any
) -> None:
    """A trainer alternates between one node and two, with and without ranks that run ahead."""
    run_ahead = Members.run_ahead
    found: dict[str, list[tuple[str, float]]] = {}
    for way in ('in-flight', 'stop-and-start'):
        monkeypatch.setattr(
            Members, 'run_ahead', run_ahead if way == 'in-flight' else lambda *_: False
        )
        with freetrain(
            tmp_path / way, ft.LocalSite(nodes=2, poll_s=0.2), horizon_s=600.0
        ) as executor:
            long = ft.freetrain_app(
                sizes=sizes,
                total_epochs=10**6,
                scaling=ft.Scaling(rate={1: 1.0, 2: 1.9}, rescale_up_s=0.1, rescale_down_s=0.1),
                mode=ft.Throughput(),
                checkpoints=ft.Checkpoints(every_s=1000.0),
            )(loads)
            short = ft.freetrain_app(
                max_nodes=1, total_epochs=10**6, scaling=ft.Scaling(rate={1: 1.0, 2: 1.9})
            )(loads)
            training = long(2.0, width, isinstance(sizes, dict), trainer_name='long')
            for i in range(ROUNDS):
                trains(training, 2)
                other = short(0.0, 8, trainer_name=f'short-{i}')
                trains(training, 1)
                other.cancel()
            trains(training, 2)
            training.cancel()
        run = Journal(executor.ledger_path).history().runs[-1]
        changes = run.trainers['long'].rescaled
        found[way] = [
            ('up' if c.after > c.before else 'down', c.seconds) for c in changes[-2 * ROUNDS :]
        ]
    print(
        f'\nPause of a rescale between 1 and 2 ranks, state of {size}, data that take 2 '
        f's to load; s, median of {ROUNDS} ({MACHINE})'
    )
    for way, pauses in found.items():
        print(
            f'  {way:15} '
            + ', '.join(
                f'{to} {statistics.median([s for t, s in pauses if t == to]):.2f}'
                for to in ('down', 'up')
            )
        )


def trains(training: Any, nodes: int) -> None:
    """Wait until it has trained on this number of nodes for a while."""
    seen: list[int] = []
    while len(set(seen)) < 3:
        progress = training.progress()
        seen = [*seen, progress.samples] if progress.nodes == nodes else []
        threading.Event().wait(0.3)
