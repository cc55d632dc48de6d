"""A training under torchrun, from a checkpoint if one is named; ranks print their times."""

import time

BEGAN = time.time()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.benchmarks.workload import BATCH, data, network, optimizer_of  # noqa: E402


def main(checkpoint: str = '') -> None:
    times = {'interpreter': BEGAN, 'process': time.time()}
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    times['rendezvous'] = time.time()
    model = network()
    optimizer = optimizer_of(model)
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved['model'])
        optimizer.load_state_dict(saved['optimizer'])
    wrapped = DistributedDataParallel(model)
    x, y = (part[: BATCH // dist.get_world_size()] for part in data())
    times['restore'] = time.time()
    nn.functional.cross_entropy(wrapped(x), y).backward()
    optimizer.step()
    times['first step'] = time.time()
    every: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, times)
    if dist.get_rank() == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown at interpreter exit aborts now and then


if __name__ == '__main__':
    main(*sys.argv[1:])
