"""Plain DDP or FSDP2 and a fragment in turns, in the same processes; rank 0 prints JSON."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.comm import world
from parsl_freetrain.training.comm.collectives import RankGroup
from parsl_freetrain.training.comm.inbox import Inbox
from parsl_freetrain.training.comm.peers import Agreement, Peers, SealedStore
from parsl_freetrain.training.loop import checkpointer, training_loop
from parsl_freetrain.training.loop.checkpointer import Checkpointer
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.fragment_run import FragmentRun
from parsl_freetrain.training.loop.rank_parts import RankParts
from parsl_freetrain.training.spec.fragment_order import RankPlace
from parsl_freetrain.training.steps.nonfinite import Watch
from tests.benchmarks.workload import BATCH, data, network, optimizer_of
from tests.support.plain_steps import plain_step
from tests.support.ranks import channel_pair, order

WARM_UP = 2


class OwnTime:
    """The fragment's clock in place of ``time``, still while the others train."""

    def __init__(self) -> None:
        self.others_s = 0.0
        for module in (training_loop, checkpointer):
            vars(module)['time'] = self
        for timed in (Agreement, Watch):
            made = timed.__init__
            made.__defaults__ = tuple(
                self.monotonic if default is time.monotonic else default
                for default in made.__defaults__ or ()
            )

    def monotonic(self) -> float:
        return time.monotonic() - self.others_s

    def time(self) -> float:
        return time.time()


_KIND = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
# Where there are accelerators, each rank of torchrun has one of its own.
DEVICE = (
    torch.device('cpu')
    if _KIND is None
    else torch.device(_KIND.type, int(os.environ.get('LOCAL_RANK', 0)))
)
ON_CPU = DEVICE.type == 'cpu'


def plain(width: int, sharded: bool, parts: int = 1) -> Iterator[None]:
    """Train on with plain DDP or FSDP2, in so many micro-batches; yields after each step."""
    torch.manual_seed(0)
    model = network(width)
    if sharded:
        mesh = init_device_mesh('cpu', (dist.get_world_size(),))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model.to(DEVICE))
    optimizer = optimizer_of(model)
    dataset = TensorDataset(*data())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(
        dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler, pin_memory=not ON_CPU
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        epoch += 1
        for x, y in loader:
            with plain_step():
                optimizer.zero_grad()
                each = [one.to(DEVICE, non_blocking=True).chunk(parts) for one in (x, y)]
                for number, (some, theirs) in enumerate(zip(*each, strict=True), 1):
                    with nullcontext() if number == parts else model.no_sync():  # type: ignore[operator]
                        out = nn.functional.cross_entropy(model(some), theirs)
                        (out * (len(some) / len(x)) if parts > 1 else out).backward()
                optimizer.step()
            yield


def context(folder: str, peers: Peers, device: torch.device, **how: Any) -> FragmentContext:
    """Of this process as a rank of a training that does not end."""
    channel, _ = channel_pair()
    how |= {'total_samples': 10**12, 'deadline': time.monotonic() + 1e6, 'checkpoint_every_s': 1e9}
    ordered = order(Path(folder), trainer='bench', store=folder, seed=1, **how)
    place = RankPlace(peers.rank, peers.world_size, peers.rank, 1, '')
    keeper = Checkpointer(PosixCheckpointStore(Path(folder), 'bench'), ordered, channel, None)
    parts = RankParts(ordered, place, peers, channel, Inbox(channel), keeper, device, None)
    return FragmentContext(FragmentRun(parts))


def fragment(width: int, mode: str, on_nan: str, folder: str, sharded: bool) -> Iterator[None]:
    """Train on as a fragment does; yields after each step."""
    size, (mode, _, shards) = dist.get_world_size(), mode.partition('/')
    how: dict[str, Any] = {'mode': mode, 'shards': int(shards or size), 'on_nan': on_nan}
    if sharded:
        how |= {'shape': Shape(shard=size), 'shapes': {size: Shape(shard=size)}}
    ctx = context(folder, _peers(), DEVICE, **how)
    ctx.torch_distributed()  # the others need the group, too
    torch.manual_seed(0)
    model = network(width)
    if sharded:
        model = ctx.shard(model, blocks=(nn.Linear,))
    model, optimizer = ctx.prepare(model, optimizer_of(model))
    position = ctx.samples
    for x, y in ctx.loop(TensorDataset(*data()), BATCH):
        if ctx.samples != position:  # a batch may take several micro-batches
            world._in_body = lambda: False  # the others exchange while this one's body runs
            yield
            position = ctx.samples
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def _peers() -> Peers:
    if dist.get_world_size() == 1:
        return Peers()
    gang = RankGroup.__new__(RankGroup)  # the process group is torchrun's
    gang.rank, gang.world_size = dist.get_rank(), dist.get_world_size()
    gang.exchanges_on_cpu = ON_CPU
    gang._group, gang._open = dist.group.WORLD, []
    gang._texts = SealedStore(dist.distributed_c10d._get_default_store(), 'a benchmark')
    return gang


def seconds(steps: Callable[[], None], count: int) -> tuple[float, float]:
    """Wall and CPU time of a number of steps that all ranks begin together."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        steps()
    if not ON_CPU:
        torch.accelerator.synchronize(DEVICE)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def main(
    width: int, blocks: int, steps: int, mode: str, on_nan: str, *, sharded: bool = False
) -> None:
    """``mode``: such as 'reproducible/4' with four shards. ``sharded``: FSDP2 in place of DDP."""
    torch.set_num_threads(1)
    if not ON_CPU:
        torch.accelerator.set_device_index(DEVICE.index)
    dist.init_process_group('gloo' if ON_CPU else None)
    own_time = OwnTime()
    parts = max(1, int(mode.partition('/')[2] or 1) // dist.get_world_size())
    with tempfile.TemporaryDirectory() as folder:
        runs = (
            plain(width, sharded).__next__,  # an iterator would be a variable that is saved
            plain(width, sharded, parts).__next__,
            fragment(width, mode, on_nan, f'{folder}/store', sharded).__next__,
        )
        times: tuple[list[tuple[float, float]], ...] = ([], [], [])
        orders = list(permutations(range(len(runs))))
        for block in range(WARM_UP + blocks):
            for which in orders[block % len(orders)]:
                began = time.monotonic()
                times[which].append(seconds(runs[which], steps))
                if which < 2:
                    own_time.others_s += time.monotonic() - began
    # Of each block: seconds of the two plain ones, and of the fragment.
    found = np.array([taken[WARM_UP:] for taken in times])
    first, second, ours = found[:, :, 0]
    cpu = torch.tensor(found[:, :, 1].sum(1))
    dist.all_reduce(cpu)  # the ranks have unequal numbers of shards
    if dist.get_rank() == 0:
        speed, interval = _median(np.array([first / ours, *[second / ours] * (parts == 1)]))
        answer = {
            'plain_ms': 1e3 * float(np.median([first, *[second] * (parts == 1)])),
            'fragment_ms': 1e3 * float(np.median(ours)),
            'speed': speed,
            'interval': interval,
            'cpu': float((cpu[0] + cpu[int(parts == 1)]) / 2 / cpu[2]),
            'cpu_of_parts': float(cpu[1] / cpu[2]),
            'plain_speed': _median(np.array([first / second])),
            'plain_cpu': float(cpu[0] / cpu[1]),
        }
        print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's teardown at interpreter exit aborts now and then


def _median(ratios: np.ndarray) -> tuple[float, list[float]]:
    """The median of ratios (kinds, blocks), and its 95 % interval by bootstrap over the blocks."""
    count = ratios.shape[1]
    drawn = ratios[:, np.random.default_rng(0).integers(count, size=(2000, count))]
    medians = np.median(drawn, axis=(0, 2))
    return float(np.median(ratios)), np.quantile(medians, (0.025, 0.975)).tolist()


if __name__ == '__main__':
    numbers = map(int, sys.argv[1:4])
    main(*numbers, *sys.argv[4:6], sharded=sys.argv[6:] == ['sharded'])  # type: ignore[arg-type]
