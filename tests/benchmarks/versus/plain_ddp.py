"""Plain DDP that saves every few seconds and goes on from its last save."""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.versus.constants import BATCH, EVERY_S, SAVED
from tests.benchmarks.versus.training import Batches, StepLog, network, optimizer_of


def main() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=30))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    optimizer = optimizer_of(model)
    position = 0
    path = os.environ[SAVED]
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved['model'])
        optimizer.load_state_dict(saved['optimizer'])
        position = saved['position']
    wrapped, batches, log = DistributedDataParallel(model), Batches(), StepLog(model)
    saved_at = time.monotonic()
    while True:
        x, y, factor = batches.part(position, rank, world)
        optimizer.zero_grad()
        (factor * nn.functional.cross_entropy(wrapped(x), y)).backward()
        optimizer.step()
        log.step(position, world)
        position += BATCH
        if rank == 0 and (asked or time.monotonic() - saved_at > EVERY_S):
            both = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
            torch.save({**both, 'position': position}, f'{path}.new')
            os.replace(f'{path}.new', path)
            saved_at = time.monotonic()
        if asked:
            os._exit(0)


if __name__ == '__main__':
    main()
