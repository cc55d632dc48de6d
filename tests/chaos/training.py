"""The training of the chaos tests, which is restarted again and again: ``python -m
tests.chaos.training FOLDER EPOCHS NODES EVERY SEED``.

Its network has a parameter that counts: every sample that the weights have seen has added 2**-3 to
an entry of its own, in exact arithmetic. However often steps are repeated, at the end each entry
must have the exact value for the number of epochs.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable
from typing import Any

import parsl
from parsl.config import Config

from parsl_freetrain import (
    BackfillProvider,
    Checkpoints,
    FragmentContext,
    FreeTrainExecutor,
    HtexOptions,
    LocalSite,
    Policy,
    Reproducible,
    Scaling,
    Timeouts,
    freetrain_app,
)
from parsl_freetrain.testing import disk_full_at, fail_at, kill_between, stop_at, with_faults
from parsl_freetrain.testing.faults import Fault

SAMPLES, BATCH = 64, 8
NAME = 'chaos'
HANG_S = 8.0


def counted(ctx: FragmentContext, pause_s: float = 0.0) -> None:
    """Fit a small network with dropout and momentum, and count every sample."""
    import time

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
            self.count = nn.Parameter(torch.zeros(SAMPLES))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            return out

    torch.manual_seed(3)
    model = Counting()
    optimizer = torch.optim.SGD(
        [
            {'params': model.net.parameters(), 'lr': 0.05, 'momentum': 0.9},
            {'params': [model.count], 'lr': 1.0, 'momentum': 0.0},
        ],
        lr=0.05,
    )
    model, optimizer = ctx.prepare(model, optimizer)
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True))
    for index, features, target in ctx.loop(data, BATCH):
        optimizer.zero_grad()
        loss = ((model(features) - target) ** 2).mean() - model.count[index].mean()
        loss.backward()
        optimizer.step()
        ctx.report(loss=loss.item())
        time.sleep(pause_s)


def faults(seed: int, every: int) -> list[Fault]:
    """What goes wrong from within, in every so-manieth fragment: killed between writing and
    committing, stopped, a full disk, an error.
    """
    kinds: list[Callable[[int], Fault]] = [
        lambda f: kill_between('written', 'committed', fragment=f),
        lambda f: kill_between('manifest', 'committed', fragment=f),
        lambda f: disk_full_at(1000, fragment=f),
        lambda f: fail_at(0, 0, fragment=f),
        lambda f: stop_at(0, 0, after_s=0.2, fragment=f),
    ]
    return (
        [
            kinds[(number + seed) % len(kinds)](every * number)
            for number in range(1, 1 + 1000 // every)
        ]
        if every
        else []
    )


def app(epochs: int, nodes: int, broken: tuple[Any, ...]) -> Any:
    return freetrain_app(
        max_nodes=nodes,
        total_epochs=epochs,
        scaling=Scaling(rate={1: 1.0, 2: 1.9, 4: 3.5}, rescale_up_s=0.1, rescale_down_s=0.1),
        checkpoints=Checkpoints(every_s=0.2),
        mode=Reproducible(shards=4),
    )(with_faults(counted, *broken))


def main(folder: str, epochs: str, nodes: str, every: str, seed: str) -> None:
    faulthandler.register(signal.SIGUSR2)  # to see what it waits for, should it hang
    broken = tuple(faults(int(seed), int(every)))
    executor = FreeTrainExecutor(
        provider=BackfillProvider(site=LocalSite(nodes=int(nodes), poll_s=0.2), min_hole_s=1.0),
        checkpoint_dir=f'{folder}/checkpoints',
        policy=Policy(horizon_s=20.0, retries=10_000),
        timeouts=Timeouts(hang_s=HANG_S, stop_grace_s=2.0),
        htex=HtexOptions(heartbeat_period=1, heartbeat_threshold=4),
        max_workers_per_node=0,
    )
    with parsl.load(Config(executors=[executor], strategy='none', run_dir=f'{folder}/runinfo')):
        print(
            app(int(epochs), nodes=int(nodes), broken=broken)(
                pause_s=0.02 if every != '0' else 0.0, trainer_name=NAME
            )
            .result()
            .samples
        )


if __name__ == '__main__':
    main(*sys.argv[1:])
