"""Checkpoints and steps of a sharded state, beside plain FSDP2; test_start.py has rescales."""

import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parsl_freetrain.core.model.events import CheckpointSaved
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint import fault_hooks
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.loop.start import SharedState
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.benchmarks.test_speed import RANKS, in_turns
from tests.benchmarks.workload import MACHINE
from tests.support.ranks import order, ranks, running_fork_server

BLOCKS = int(os.environ.get('BENCH_BLOCKS', 100))
WIDTH, LAYERS = (
    1024,
    int(os.environ.get('BENCH_LAYERS', 80)),
)  # 84 M parameters of 4 bytes, and twice as much for Adam: 1.0 GB
SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}


def train(ctx: FragmentContext) -> None:
    """Four steps; reports what reading took, prints the CPU time of writing and reading."""
    at: dict[str, float] = {}

    def reached(stage: str) -> None:
        at[stage] = time.thread_time()
        if stage == 'part-data':
            print(f'CPU seconds for writing: {at[stage] - at["part-begun"]:.3f}')

    fault_hooks.on_saving.append(reached)
    with torch.device('meta'):
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = ctx.shard(model, blocks=(nn.Linear,))
    began, saved, used = time.monotonic(), ctx._run.saved, time.process_time()
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters()))
    bytes_read = saved.disk.bytes_read if isinstance(saved, SharedState) else 0
    print(f'CPU seconds for reading: {time.process_time() - used:.3f}')
    ctx.report(read_s=time.monotonic() - began, read_gb=bytes_read / 1e9)
    for x in ctx.loop(list(torch.ones(16, WIDTH)), 8):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()


def save(
    fork_server: ForkClient, folder: Path, number: int, writers: int
) -> tuple[Checkpoint, float, float]:
    """CPU time of all ranks for reading a checkpoint and writing the next one meanwhile."""
    how: Any = {'shape': SHAPES[writers], 'shapes': SHAPES, 'keep': 1, 'checkpoint_every_s': 0.01}
    ordered = order(folder, number, total_samples=32 * number, **how)
    with ranks(fork_server, ordered, writers, folder, train) as gang:
        outcomes = gang.run()
        assert [outcome.how for outcome in outcomes] == ['finished'] * writers
        logs = [rank.log.read_text() for rank in gang.ranks]
        reading, writing = (
            sum(float(re.findall(f'for {what}: (.*)', log)[0]) for log in logs)
            for what in ('reading', 'writing')
        )
        return gang.ranks[0].said(CheckpointSaved)[0].checkpoint, reading, writing


def test_checkpoints_by_several_writers(tmp_path: Path) -> None:
    print(
        f'\nA sharded state of {3 * LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 1e9:.2f} GB '
        f'({MACHINE}, {tmp_path})'
    )
    with running_fork_server(tmp_path) as fork_server:
        for number, writers in enumerate((1, 2, 4, 1), 1):
            saved, reading, writing = save(fork_server, tmp_path, number, writers)
            metrics = saved.metrics
            read = (
                f'rank 0 read {metrics["read_gb"]:.2f} GB in {metrics["read_s"]:.2f} s, '
                f'CPU time of all {reading:.2f} s'
                if number > 1
                else 'nothing to read'
            )
            print(
                f'  {writers} ranks: {read}; training held up for {saved.pause_s:.2f} s, written '
                f'and committed in {saved.seconds:.2f} s, CPU time of all {writing:.2f} s'
            )


def test_what_a_step_of_a_sharded_fragment_costs() -> None:
    """Blocks of steps of plain FSDP2 and of a fragment in turns, in the same processes."""
    print(f'\nA sharded fragment and plain FSDP2 {RANKS} ranks, {BLOCKS} blocks ({MACHINE})')
    for width, steps in ((384, 4), (1024, 2)):
        for mode in ('throughput', 'reproducible'):
            in_turns(f'{mode:12}', width, BLOCKS, steps, mode, 'stop', 'sharded')
