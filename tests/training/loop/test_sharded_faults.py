"""A sharded save is struck at each of its stages: the checkpoint before is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, Shape
from parsl_freetrain.testing import Fault, disk_full_at, with_faults
from parsl_freetrain.training.checkpoint import fault_hooks, part_writers
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from tests.chaos.disks import small_disk
from tests.support.damage import flip, full_disk
from tests.support.faults import kill_between
from tests.support.ranks import KILLED, order, ranks

TWO = Shape(shard=2)
BATCH = 4


def train(ctx: FragmentContext) -> None:
    """Saves as often as it can, one after the other."""
    torch.manual_seed(3)
    model = ctx.shard(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)))
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters()))
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(16, 3, generator=made))
    for (x,) in ctx.loop(data, BATCH):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()


def stuck(ctx: FragmentContext) -> None:
    """Rank 1's writing thread never comes back, as with a file server that is gone."""

    def reached(stage: str) -> None:
        if stage == 'part-begun' and ctx.rank == 1:
            time.sleep(10_000)

    fault_hooks.on_saving.append(reached)
    part_writers._LEAST_S = 0.2
    ctx.after_step(lambda: time.sleep(0.05))  # which takes no processor meanwhile
    train(ctx)


def ordered(folder: Path, number: int = 1, samples: int = 10**6) -> FragmentOrder:
    """Each test has its trainer: all share a fork server, which may keep another's state."""
    every_s, shapes = 1e-9 if samples == 10**6 else 3600.0, {'shape': TWO, 'shapes': {2: TWO}}
    given = {'trainer': folder.name, 'total_samples': samples, 'checkpoint_every_s': every_s}
    return order(folder, number, **given, **shapes)


def struck(
    fork_server: ForkClient, folder: Path, function: Callable[..., Any], *ordering: int
) -> tuple[list[Any], list[str]]:
    with ranks(fork_server, ordered(folder, *ordering), 2, folder, function) as gang:
        outcomes = gang.run()
        return outcomes, [rank.log.read_text() for rank in gang.ranks]


def committed(folder: Path) -> int:
    return len(PosixCheckpointStore(folder / 'store', folder.name).checkpoints())


@pytest.mark.parametrize(
    ('rank', 'stage', 'kept'),
    [(0, 'before-commit', 1), (0, 'committed', 2), (1, 'part-data', 1), (1, 'part-written', 2)],
)
def test_a_kill_leaves_the_checkpoint_before(
    fork_server: ForkClient, tmp_path: Path, rank: int, stage: str, kept: int
) -> None:
    stages = fault_hooks.SAVING_STAGES
    last = stages[-1]
    fault = (
        kill_between(stage, last, rank=rank, checkpoint=2)
        if stage != last
        else Fault(0, 1, kill_between('begin', last).strike, stage=last, checkpoint=2)
    )
    outcomes, logs = struck(fork_server, tmp_path, with_faults(train, fault))
    assert outcomes[rank] is KILLED
    assert outcomes[1 - rank].how == 'peer-lost', logs
    assert committed(tmp_path) == kept


def out_of_room(rank: int, store: Path, flag: Path) -> Callable[[FragmentContext], None]:
    """In its second save, ``rank`` has no room for its part, after the other one has written."""

    def function(ctx: FragmentContext) -> None:
        begun, filled = 0, full_disk(store)

        def reached(stage: str) -> None:
            nonlocal begun
            begun += stage == 'part-begun'
            if begun == 2 and ctx.rank != rank and stage == 'part-written':
                flag.touch()
            if begun == 2 and ctx.rank == rank and stage == 'part-begun':
                while not flag.exists():
                    time.sleep(0.01)
                filled.__enter__()

        fault_hooks.on_saving.append(reached)
        train(ctx)

    return function


def test_a_full_disk_on_one_rank_is_a_sentence(fork_server: ForkClient, tmp_path: Path) -> None:
    """ENOSPC where root may make a small file system, else EFBIG."""
    store = tmp_path / 'store'
    with small_disk(store) as mounted:
        how = (
            out_of_room(1, store, tmp_path / 'written')
            if mounted
            else with_faults(train, disk_full_at(100, rank=1, checkpoint=2))
        )
        outcomes, logs = struck(fork_server, tmp_path, how)
        assert outcomes[0].how in ('error', 'storage'), logs
        why = 'No space left on device' if mounted else 'File too large'
        assert why in outcomes[0].error.message
        assert 'the one before is still there' in outcomes[0].error.message
        assert committed(tmp_path) == 1
        for filler in store.glob('.filler-*'):
            filler.unlink()
        assert struck(fork_server, tmp_path, train, 2, 100 * BATCH)[0][0].how == 'finished'


def test_a_rank_that_never_finishes(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, ordered(tmp_path), 2, tmp_path, stuck) as gang:
        first = gang.ranks[0]
        gang.hear(lambda: first.status is not None)
        assert first.outcome.how == 'error'
        assert 'Ranks 1 have not written their parts' in first.outcome.error.message
    assert committed(tmp_path) == 0


@pytest.mark.parametrize('damage', ['lost', 'flipped'])
def test_damage_to_a_part_is_found_and_the_checkpoint_before_used(
    fork_server: ForkClient, tmp_path: Path, damage: str
) -> None:
    """A lost part is noticed before reading, a flipped byte by its rank; the rest goes on."""
    struck(fork_server, tmp_path, train, 1, BATCH)
    struck(fork_server, tmp_path, train, 2, 2 * BATCH)
    file = max((tmp_path / 'store').glob('ckpt-*')) / 'rank-1.safetensors'
    if damage == 'lost':
        file.unlink()
    else:
        flip(file, -3)
        outcomes, logs = struck(fork_server, tmp_path, train, 3, 3 * BATCH)
        assert [outcome.how for outcome in outcomes] == ['peer-lost'] * 2, logs
        assert 'rank-1.safetensors' in ''.join(logs)
    outcomes, logs = struck(fork_server, tmp_path, train, 4, 3 * BATCH)
    assert [outcome.how for outcome in outcomes] == ['finished'] * 2, logs
    assert len(list((tmp_path / 'store' / 'bad').glob('ckpt-*'))) == 1
    assert read_state(outcomes[0].path).position.samples == 3 * BATCH
