"""The training of test_speed.py as a plain script for torchrun; rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.benchmarks.workload import BATCH, data, network


def main(total_samples: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = TensorDataset(*data())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // world, sampler=sampler)
    first_step_at, began, seen, epoch = 0.0, 0.0, 0, 0
    while seen < total_samples:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            if not first_step_at:
                first_step_at, began = time.time(), time.monotonic()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen += BATCH
            if seen >= total_samples:
                break
    rate = seen / (time.monotonic() - began)
    if dist.get_rank() == 0:
        print(json.dumps({'first_step_at': first_step_at, 'rate': rate}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown at interpreter exit aborts now and then


if __name__ == '__main__':
    main(int(sys.argv[1]))
