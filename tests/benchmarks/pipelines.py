"""CPU time (ms) per batch of pipelines, ours and torch's, in turns, by torchrun; prints JSON."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from parsl_freetrain.training.parallel.pipeline import Pipeline
from workflows.chimera_gpt import layers, loss_of

LETTERS, LENGTH, WIDTH, BATCH, MICRO_BATCHES = 100, 64, 96, 32, 8
BATCHES_PER_ROUND = 4


def ours(method: str, x: Tensor, y: Tensor) -> tuple[Callable[[], object], torch.nn.Module]:
    how: Any = {'micro_batches': MICRO_BATCHES, 'group': dist.group.WORLD}
    model = Pipeline(layers(LETTERS, LENGTH, WIDTH), loss_of, method=method, **how)
    return lambda: model.step(x, y), model


def theirs(schedule: type, x: Tensor, y: Tensor) -> tuple[Callable[[], object], torch.nn.Module]:
    how: Any = {'micro_batches': MICRO_BATCHES, 'group': dist.group.WORLD}
    whole = Pipeline(layers(LETTERS, LENGTH, WIDTH), loss_of, method='gpipe', **how)
    module = torch.nn.Sequential(*whole.layers.values())
    rank, stages = dist.get_rank(), dist.get_world_size()
    runs = schedule(
        PipelineStage(module, rank, stages, torch.device('cpu')), MICRO_BATCHES, loss_fn=loss_of
    )

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            runs.step(x)
        else:
            runs.step(target=y)

    return step, module


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    drawn = torch.Generator().manual_seed(1)
    x, y = (torch.randint(LETTERS, (BATCH, LENGTH), generator=drawn) for _ in range(2))
    runs = {
        'ours: gpipe': ours('gpipe', x, y),
        "torch's: gpipe": theirs(ScheduleGPipe, x, y),
        'ours: 1f1b': ours('1f1b', x, y),
        "torch's: 1f1b": theirs(Schedule1F1B, x, y),
        'ours: chimera': ours('chimera', x, y),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, (step, _) in runs.items():
            # CPU time of all ranks: on a machine that does much else, time on the clock says
            # nothing.
            began = time.process_time()
            for _ in range(BATCHES_PER_ROUND):
                step()
            took = torch.tensor((time.process_time() - began) / BATCHES_PER_ROUND * 1000)
            dist.all_reduce(took)
            times[name].append(float(took))
    first = [p.grad for p in runs['ours: gpipe'][1].parameters()]
    unlike = max(
        float((a - b.grad).abs().max())
        for name in runs
        if name != 'ours: chimera'
        for a, b in zip(first, runs[name][1].parameters(), strict=True)
        if a is not None and b.grad is not None
    )
    if dist.get_rank() == 0:
        ms = {name: took[1:] for name, took in times.items()}
        print(json.dumps({'ms': ms, 'largest difference of gradients': unlike}))
    dist.destroy_process_group()


if __name__ == '__main__':
    main(int(sys.argv[1]))
