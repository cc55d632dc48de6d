"""torchft: one replica group of one rank for each node, under a lighthouse."""

from datetime import timedelta

from tests.benchmarks.versus.machine import PEERS, Machine, free_port
from tests.benchmarks.versus.systems.protocol import System

PYTHON = PEERS / 'bin' / 'python'


class Torchft(System):
    name = needs = 'torchft'

    def __init__(self) -> None:
        self._port = free_port()

    def start(self, machine: Machine, nodes: list[str]) -> None:
        machine.run(
            [
                'torchft_lighthouse',
                '--min_replicas=1',
                f'--bind=0.0.0.0:{self._port}',
                '--heartbeat_timeout_ms=1000',
                '--join_timeout_ms=3000',
                '--quorum_tick_ms=50',
            ],
            python=PYTHON,
        )
        super().start(machine, nodes)

    def join(self, machine: Machine, node: str) -> None:
        machine.run(
            [
                'torchrun',
                '--standalone',
                '--nproc-per-node=1',
                '--max-restarts=1000',
                '--monitor-interval=0.1',
                '-m',
                __name__,
            ],
            node,
            {'TORCHFT_LIGHTHOUSE': f'http://127.0.0.1:{self._port}'},
            python=PYTHON,
        )


def train() -> None:
    import os

    import torch
    from torch import nn
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    from tests.benchmarks.versus.constants import BATCH, NODE_VARIABLE
    from tests.benchmarks.versus.training import Batches, StepLog, network, optimizer_of

    torch.set_num_threads(1)
    model = network()
    plain = optimizer_of(model)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1)),
        min_replica_size=1,
        load_state_dict=lambda state: (
            model.load_state_dict(state['model']),
            plain.load_state_dict(state['optimizer']),
        ),
        state_dict=lambda: {'model': model.state_dict(), 'optimizer': plain.state_dict()},
        replica_id=os.environ[NODE_VARIABLE],
        hostname='127.0.0.1',
        timeout=timedelta(seconds=10),
        init_sync=False,  # all begin with the same weights
    )
    # The other one, over DDP, ends with an AssertionError where an exchange fails (0.2.0).
    wrapped = PureDistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    batches, log = Batches(), StepLog(model)
    while True:
        optimizer.zero_grad()  # begins to ask who takes part
        world, rank = manager.num_participants(), manager.participating_rank()
        position = BATCH * manager.current_step()
        # One that is still fetching the state takes part from the next step on.
        x, y, factor = batches.part(position, rank or 0, world)
        (factor * nn.functional.cross_entropy(wrapped(x), y)).backward()
        optimizer.step()
        if manager.current_step() * BATCH > position and rank is not None:
            log.step(position, world)


if __name__ == '__main__':
    train()
