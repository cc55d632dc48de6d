"""Ray Train with an elastic number of workers, on a Ray cluster of one raylet for each node."""

import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.benchmarks.versus.machine import PEERS, Machine, free_port
from tests.benchmarks.versus.systems.protocol import System

PYTHON = PEERS / 'bin' / 'python'
STARTED = 'Ray runtime started'
SAVE_STEPS = 50  # all workers report a checkpoint together, so a clock cannot decide when
# With Ray's defaults a lost node is noticed after half a minute. Shorter times than these lose
# nodes that are only busy starting.
QUICK = {
    'RAY_health_check_initial_delay_ms': '5000',
    'RAY_health_check_period_ms': '500',
    'RAY_health_check_timeout_ms': '1000',
    'RAY_health_check_failure_threshold': '3',
    'RAY_raylet_start_wait_time_s': '120',
    'RAY_TRAIN_HEALTH_CHECK_INTERVAL_S': '0.2',
    'RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S': '20',
    'RAY_USAGE_STATS_ENABLED': '0',
    'RAY_TRAIN_METRICS_ENABLED': '0',
    'RAY_ENABLE_UV_RUN_RUNTIME_ENV': '0',
}


class RayTrain(System):
    name = 'Ray Train'
    needs = 'ray'

    def __init__(self) -> None:
        self._port = free_port()
        self._address = f'{own_address()}:{self._port}'

    def start(self, machine: Machine, nodes: list[str]) -> None:
        self._ray(machine, '', '--head', f'--port={self._port}', '--num-cpus=0')
        until(lambda: answers((own_address(), self._port)))
        words = ['python', '-m', __name__, self._address, str(machine.folder)]
        machine.run(words, python=PYTHON, environment=QUICK)
        for node in nodes:
            self.join(machine, node)
            # Raylets of one computer that start at the same time keep each other from starting.
            until(partial(started, machine.folder / f'{node}.log'))

    def join(self, machine: Machine, node: str) -> None:
        self._ray(machine, node, f'--address={self._address}', '--num-cpus=1')

    def _ray(self, machine: Machine, node: str, *options: str) -> None:
        head = '--head' in options
        machine.run(
            [
                'ray',
                'start',
                *options,
                '--block',
                '--object-store-memory=80000000',
                '--disable-usage-stats',
                *(['--include-dashboard=false', f'--temp-dir={machine.folder}/r'] if head else []),
            ],
            node,
            python=PYTHON,
            environment=QUICK,
        )


def own_address() -> str:
    """The address that Ray takes for this computer, loopback or not."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(('192.0.2.1', 9))  # nothing is sent
        except OSError:
            return '127.0.0.1'
        return str(probe.getsockname()[0])


def until(condition: Callable[[], bool]) -> None:
    """Wait for it, for at most a minute."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)


def started(log: Path) -> bool:
    return STARTED in log.read_text()


def answers(address: tuple[str, int]) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(address) == 0


def train() -> None:
    import os
    import tempfile

    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist
    from torch import nn

    from tests.benchmarks.versus.constants import BATCH
    from tests.benchmarks.versus.training import Batches, StepLog, network, optimizer_of

    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    optimizer = optimizer_of(model)
    position = 0
    if (saved := ray.train.get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            state = torch.load(os.path.join(folder, 'saved.pt'), weights_only=True)
        model.load_state_dict(state['model'])
        optimizer.load_state_dict(state['optimizer'])
        position = state['position']
    wrapped = nn.parallel.DistributedDataParallel(model)
    batches, log = Batches(), StepLog(model)
    while True:
        x, y, factor = batches.part(position, rank, world)
        optimizer.zero_grad()
        (factor * nn.functional.cross_entropy(wrapped(x), y)).backward()
        optimizer.step()
        log.step(position, world)
        position += BATCH
        if position // BATCH % SAVE_STEPS == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
                    state['position'] = position
                    torch.save(state, os.path.join(folder, 'saved.pt'))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({'position': position}, checkpoint=checkpoint)


def main(address: str, folder: str) -> None:
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    while True:
        try:
            ray.init(address=address, log_to_driver=True)
            break
        except ConnectionError:
            time.sleep(0.1)
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(
            num_workers=(1, 4),
            resources_per_worker={'CPU': 1},
            elastic_resize_monitor_interval_s=1.0,
        ),
        run_config=RunConfig(
            name='versus',
            storage_path=f'{folder}/storage',
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        torch_config=TorchConfig(backend='gloo', timeout_s=30),
    ).fit()


if __name__ == '__main__':
    main(*sys.argv[1:])
