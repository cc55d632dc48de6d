"""FreeTrain on the local site, whose nodes come and go as the benchmark says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.versus.constants import BATCH, EVERY_S, NODE_VARIABLE
from tests.benchmarks.versus.machine import Machine
from tests.benchmarks.versus.systems.protocol import System


class Ours(System):
    blocks = True

    def __init__(self, mode: str, *, ahead: bool = False) -> None:
        self.name = f'FreeTrain, {mode}{", ranks ahead" if ahead else ""}'
        self._arguments = [mode, *(['ahead'] if ahead else [])]

    def start(self, machine: Machine, nodes: list[str]) -> None:
        super().start(machine, nodes)
        machine.run(['python', '-m', __name__, str(machine.folder), *self._arguments])


def train(ctx: Any) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from tests.benchmarks.versus.training import StepLog, data, network, optimizer_of

    os.environ[NODE_VARIABLE] = os.environ['FREETRAIN_NODE']
    torch.set_num_threads(1)
    dataset, plain = TensorDataset(*data()), network()
    model, optimizer = ctx.prepare(plain, optimizer_of(plain))
    log, position = StepLog(plain), ctx.samples
    for x, y in ctx.loop(dataset, BATCH):
        if ctx.samples != position:  # in reproducible mode a batch may take several micro-batches
            log.step(position, ctx.world_size)
            position = ctx.samples
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if ctx.samples != position:
        log.step(position, ctx.world_size)


def main(folder: str, mode: str, ahead: str = '') -> None:
    import parsl
    from parsl.config import Config

    from parsl_freetrain import (
        BackfillProvider,
        Checkpoints,
        FreeTrainExecutor,
        HtexOptions,
        LocalSite,
        Policy,
        Ranks,
        Reproducible,
        Scaling,
        Throughput,
        freetrain_app,
    )
    from parsl_freetrain.core.model.types import Hole

    class Steered(LocalSite):
        """Nodes are idle while a file has their name; the first two are one block."""

        def _free(self, now: float) -> dict[str, Any]:
            present = {path.name for path in Path(folder, 'nodes').iterdir()}
            free = super()._free(now)
            return {node: interval for node, interval in free.items() if node in present}

        def holes(self) -> tuple[Hole, ...]:
            free = sorted(name for hole in super().holes() for name in hole.names)
            pair = [name for name in free if name in ('node0', 'node1')]
            groups = [pair, *([name] for name in free if name not in pair)]
            return tuple(Hole(len(names), names=tuple(names)) for names in groups if names)

    executor = FreeTrainExecutor(
        provider=BackfillProvider(
            site=Steered(nodes=[f'node{i}' for i in range(4)], poll_s=0.2), min_hole_s=1.0
        ),
        checkpoint_dir=f'{folder}/checkpoints',
        policy=Policy(horizon_s=20.0, retries=10_000),
        htex=HtexOptions(heartbeat_period=1, heartbeat_threshold=4),
        max_workers_per_node=0,
    )
    app = freetrain_app(
        max_nodes=4,
        total_epochs=10**6,
        scaling=Scaling(
            rate={1: 1.0, 2: 1.9, 3: 2.7, 4: 3.5}, rescale_up_s=0.1, rescale_down_s=0.1
        ),
        checkpoints=Checkpoints(every_s=EVERY_S),
        mode=Reproducible() if mode == 'reproducible' else Throughput(),
        ranks=Ranks(ahead=bool(ahead)),
    )(train)
    with parsl.load(Config(executors=[executor], strategy='none', run_dir=f'{folder}/runinfo')):
        app(trainer_name='versus').result()


if __name__ == '__main__':
    main(*sys.argv[1:])
