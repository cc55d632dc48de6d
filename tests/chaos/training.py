"""The training of the chaos tests: ``python -m tests.chaos.training FOLDER EPOCHS NODES PAUSE_S
[OVERLAP]``, with the latter in rounds. One parameter counts: each sample seen adds 2**-3 to its
entry, exactly, whatever is repeated (in rounds, with the mean of replicas only).
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import parsl
from parsl.config import Config

import parsl_freetrain as ft
from parsl_freetrain.core.model.errors import FreeTrainError
from tests.chaos.points import with_ordered_faults
from tests.support.damage import scheduler_silent_for
from tests.support.login import Computers

SAMPLES, BATCH = 64, 8
CLOCK_STEPS_S = {'clock set back': -3600.0, 'clock set ahead': 3600.0}
SILENCES, PAUSE_S = ('scheduler silent', 'scheduler refuses', *CLOCK_STEPS_S), 3.0
"""Faults that the submitting process causes in itself, and for how long."""

NAME = 'chaos'
HANG_S = 8.0
MODE, INNER = ft.Reproducible(shards=4), ft.Reproducible(shards=2)
REPLICAS, ROUNDS, STEPS = 2, 12, 64  # a round has eight epochs
ROUNDS_EPOCHS = ROUNDS * STEPS * BATCH // SAMPLES


def in_rounds(overlap: int) -> ft.DiLoCo:
    """With an outer optimizer, or with ``overlap=1`` the mean."""
    return ft.DiLoCo(
        replicas=REPLICAS,
        steps=STEPS,
        outer=None if overlap else ft.Nesterov(lr=0.5, momentum=0.5),
        inner=INNER,
        overlap=overlap,
    )


def counted(ctx: ft.FragmentContext, pause_s: float = 0.0) -> None:
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
    trained = {'params': model.net.parameters(), 'lr': 0.05, 'momentum': 0.9}
    counted = {'params': [model.count], 'lr': 1.0, 'momentum': 0.0}
    optimizer = torch.optim.SGD([trained, counted], lr=0.05)
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


def orders_in(folder: str | Path) -> Path:
    """Where files say which faults are wanted from within."""
    return Path(folder) / 'orders'


def app(epochs: int, nodes: int, orders: Path, mode: Any = MODE) -> Any:
    return ft.freetrain_app(
        max_nodes=nodes if mode is MODE else min(nodes, 2),
        total_epochs=epochs,
        scaling=ft.Scaling(rate={1: 1.0, 2: 1.9, 4: 3.5}, rescale_up_s=0.1, rescale_down_s=0.1),
        checkpoints=ft.Checkpoints(every_s=0.2),
        mode=mode,
    )(with_ordered_faults(counted, orders))


def watch_scheduler(provider: ft.BackfillProvider, orders: Path) -> None:
    """Let the site answer no questions, or open no blocks, for a while when that is wanted."""
    site: Any = provider.site
    open_block, now = site.open_block, time.time
    refuses_until = ahead_s = 0.0
    time.time = lambda: now() + ahead_s

    def refuse(*given: Any, **options: Any) -> Any:
        if time.monotonic() < refuses_until:
            raise FreeTrainError('the scheduler accepts no job, as a test wants it')
        return open_block(*given, **options)

    site.open_block = refuse
    while True:
        time.sleep(0.1)
        for order in orders.iterdir():
            if order.name in SILENCES:
                order.unlink()
                if order.name in CLOCK_STEPS_S:
                    ahead_s += CLOCK_STEPS_S[order.name]
                elif order.name == 'scheduler silent':
                    scheduler_silent_for(provider, PAUSE_S)
                else:
                    refuses_until = time.monotonic() + PAUSE_S


def main(folder: str, epochs: str, nodes: str, pause_s: str, overlap: str = '') -> None:
    faulthandler.register(signal.SIGUSR2)  # to see what it waits for, should it hang
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let it be ignored
    names = nodes.split(',')
    site = Computers(names, poll_s=0.2) if names[1:] else ft.LocalSite(nodes=int(nodes), poll_s=0.2)
    most = len(names) if names[1:] else int(nodes)
    provider = ft.BackfillProvider(site=site, min_hole_s=1.0)
    orders = orders_in(folder)
    threading.Thread(target=watch_scheduler, args=(provider, orders), daemon=True).start()
    executor = ft.FreeTrainExecutor(
        provider=provider,
        checkpoint_dir=f'{folder}/checkpoints',
        policy=ft.Policy(horizon_s=20.0, retries=10_000),
        timeouts=ft.Timeouts(hang_s=HANG_S, stop_grace_s=2.0, join_s=60.0),
        htex=ft.HtexOptions(heartbeat_period=1, heartbeat_threshold=4),
        max_workers_per_node=0,
    )
    with parsl.load(Config(executors=[executor], strategy='none', run_dir=f'{folder}/runinfo')):
        trained = app(int(epochs), most, orders, in_rounds(int(overlap)) if overlap else MODE)
        print(trained(pause_s=float(pause_s), trainer_name=NAME).result().samples)


if __name__ == '__main__':
    main(*sys.argv[1:])
