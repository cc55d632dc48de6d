"""What needs an accelerator: ``make gpu`` runs it on a node with some, and prints a table for
docs/evidence/measurements.md. Elsewhere it is skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.data.loader import MicroBatch, make_loader, to_device
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import CheckpointSaved, Progress, Started
from tests.benchmarks.test_speed import under_torchrun
from tests.support.ranks import Rank, order, ranks, running_fork_server

COUNT = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COUNT, reason='torch finds no accelerator on this computer'),
]
WIDTH, LAYERS, BATCH, TOTAL = 256, 4, 16, 640
ROWS: list[str] = []


@pytest.fixture(scope='module')
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkClient]:
    """A fork server that has imported torch."""
    with running_fork_server(tmp_path_factory.mktemp('fork_server')) as parent:
        yield parent


@pytest.fixture(scope='module', autouse=True)
def table() -> Iterator[None]:
    """Prints what was measured."""
    yield
    device = torch.get_device_module().get_device_name(0)
    print(f'\n\n{COUNT} x {device}, torch {torch.__version__}\n\n| what | figure |\n|---|---|')
    print('\n'.join(ROWS))


def sizes() -> list[int]:
    """Numbers of ranks, of which each has a device of its own."""
    return [count for count in (1, 2, 4) if count <= COUNT]


def ordered(folder: Path, world_size: int, fragment: int = 1, **changes: Any) -> Any:
    """An order for ranks that share this node's devices, one each."""
    return order(folder, fragment, **{'total_samples': TOTAL, 'per_node': world_size, **changes})


class Block(nn.Module):
    """Attention and a convolution: both have backward passes that are not deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        mixed: torch.Tensor = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return mixed


def train(ctx: FragmentContext, kill_at: int = TOTAL, killed: int = -1, pause_s: float = 0) -> None:
    """Reports the seconds per sample without the first steps, and the device's memory in use."""
    import time

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model, optimizer = ctx.prepare(
        model, torch.optim.AdamW(model.parameters(), fused=True), clip_grad_norm=1.0
    )
    x = torch.randn(64, 32, WIDTH, generator=torch.Generator().manual_seed(1))
    began, samples = 0.0, 0
    for batch in ctx.loop(x, BATCH):
        if ctx.samples >= TOTAL // 4 and not began:
            began, samples = time.monotonic(), ctx.samples
        if ctx.samples >= kill_at and ctx.rank == killed:
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        with torch.autocast(ctx.device.type, torch.bfloat16):
            loss = (model(batch).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        loss.item()
        if began and ctx.samples > samples:
            ctx.report(rate=(ctx.samples - samples) / (time.monotonic() - began))
        time.sleep(pause_s)


def started(gang: Any) -> float:
    """Seconds from the launch to the first step."""
    seconds: float = gang.ranks[0].said(Started)[0].at - gang.launched_at
    return seconds


def weights_of(fork_server: ForkClient, folder: Path, world_size: int, **changes: Any) -> Any:
    """The final weights, and the last metrics."""
    with ranks(
        fork_server, ordered(folder, world_size, **changes), world_size, folder, train
    ) as gang:
        outcomes = gang.run()
        log = gang.ranks[0].log.read_text()
        assert {outcome.how for outcome in outcomes} == {'finished'}, log
        assert f'device {torch.accelerator.current_accelerator().type}' in log  # type: ignore[union-attr]
        if world_size == max(sizes()):
            ROWS.append(f'| warm start, {world_size} ranks | {started(gang):.2f} s |')
    return load_weights(outcomes[0].path), outcomes[0].metrics


def test_the_bits_do_not_depend_on_the_ranks(fork_server: ForkClient, tmp_path: Path) -> None:
    found = [
        weights_of(fork_server, tmp_path / str(count), count, shards=4)[0]
        for count in (*sizes(), 1)
    ]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    ROWS.append(f'| same bits on {", ".join(map(str, sizes()))} ranks, and again on 1 | yes |')


def test_a_killed_rank_ends_the_others_and_frees_the_memory(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    count = max(sizes())
    free = torch.accelerator.get_memory_info(0)[0]
    again = ordered(tmp_path, count, 1, mode='throughput', total_samples=1_000_000)
    with ranks(
        fork_server, again, count, tmp_path, train, kill_at=TOTAL // 2, killed=count - 1
    ) as gang:
        gang.hear(lambda: gang.ranks[-1].status is not None)
        began = time.monotonic()

        def is_over(rank: Rank) -> bool:
            return rank.status is not None

        gang.hear(lambda: all(map(is_over, gang.ranks)), timeout_s=60.0)
        ROWS.append(f'| SIGKILL to the end of all ranks | {time.monotonic() - began:.2f} s |')
        assert gang.ranks[-1].status == -9
    assert torch.accelerator.get_memory_info(0)[0] >= free - 64 * 2**20
    ROWS.append('| memory of the device after a kill is free as before | yes |')
    with ranks(
        fork_server, ordered(tmp_path, count, 2, mode='throughput'), count, tmp_path, train
    ) as g:
        assert {outcome.how for outcome in g.run()} == {'finished'}


def test_a_snapshot_is_written_while_training_goes_on(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    saving = ordered(tmp_path, 1, mode='throughput', checkpoint_every_s=0.2)
    with ranks(fork_server, saving, 1, tmp_path, train, pause_s=0.02) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished']
        saved = gang.ranks[0].said(CheckpointSaved)
        assert len(saved) > 1
        assert gang.ranks[0].said(Progress)
    pause, seconds = saved[0].pause_s, saved[0].seconds
    ROWS.append(f'| checkpoint: pause of training, written in | {pause:.3f} s, {seconds:.3f} s |')


def test_batches_are_page_locked_until_they_are_on_the_device() -> None:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, 0)
    micro_batches = [MicroBatch((0, 1), 0, 0, 1.0)]
    (batch,) = make_loader(list(torch.arange(2.0)), micro_batches, 7, None, 0, device)
    assert batch.is_pinned()
    moved = to_device(batch, device)
    assert moved.device == device
    assert moved.tolist() == [0.0, 1.0]
    ROWS.append('| batches page-locked until they are on the device | yes |')


def test_speed_relative_to_one_rank(fork_server: ForkClient, tmp_path: Path) -> None:
    rates = {
        count: weights_of(fork_server, tmp_path / str(count), count, mode='throughput')[1]['rate']
        for count in sizes()
    }
    for count, rate in rates.items():
        ROWS.append(f'| samples per second, {count} ranks | {rate:.0f} ({rate / rates[1]:.2f}) |')


def test_speed_relative_to_plain_ddp() -> None:
    """In turns, block by block, in the same processes."""
    count = max(sizes())
    found = under_torchrun(count, 'alternating', 1024, 30, 20, 'throughput', 'stop')
    low, high = found['interval']
    ROWS.append(
        f'| speed relative to plain DDP, {count} ranks, step of {found["plain_ms"]:.1f} ms '
        f'| {found["speed"]:.3f} ({low:.3f} to {high:.3f}) |'
    )
