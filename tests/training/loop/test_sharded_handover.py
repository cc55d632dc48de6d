"""What stays of a sharded state in memory: parts of the last checkpoint and of the last step; and
on the disk, where a save is struck at each of its stages: the checkpoint before.
"""

import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from parsl_freetrain import FragmentContext, Shape, same_weights
from parsl_freetrain.core.model.events import FragmentProgressed, FragmentStarted
from parsl_freetrain.testing import Fault, disk_full_at, with_faults
from parsl_freetrain.training.checkpoint import fault_hooks, part_writers
from parsl_freetrain.training.checkpoint.manifest import MARKER
from parsl_freetrain.training.checkpoint.source import read_state
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, Handover
from parsl_freetrain.training.spec.messages import StateUsed, StopTraining
from tests.chaos.disks import small_disk
from tests.support.damage import flip, full_disk
from tests.support.faults import kill_between
from tests.support.ranks import KILLED, Ranks, all_finish, ended, order, ranks

SHAPES = {1: Shape(), 2: Shape(shard=2), 4: Shape(shard=4)}
BATCH, SIZE, TOTAL = 4, 8, 80


def train(
    ctx: FragmentContext,
    waits: bool = False,
    kill: tuple[int, str] | None = None,
    remembers: bool = False,
) -> None:
    """Rank ``kill[0]`` dies at 24 samples, or, if it ``waits``, at the first checkpoint."""

    def die(where: str) -> None:
        if ctx.fragment == 1 and ctx.samples == 24 and (ctx.rank, where) == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    with torch.device('meta'):
        model: Any = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))
    model = ctx.shard(model, blocks=(nn.Linear,))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = ctx.samples_lr(optimizer, lambda samples: 1.0 / (1 + samples / 20))
    model, optimizer, schedule = ctx.prepare(model, optimizer, schedule)
    model[1].register_forward_hook(lambda *_: die('forward'))
    ctx.each_epoch(lambda: ctx.checkpoint() if waits and ctx.fragment == 1 else None)
    if remembers and ctx.is_main and ctx.fragment == 2:
        assert ctx.state == {'seen': ctx.samples - BATCH}
    x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1))
    for (features,) in ctx.loop(TensorDataset(x), BATCH):
        if waits and ctx.fragment == 1 and ctx.samples >= SIZE:
            while not list(Path(ctx._run.order.store).glob(f'ckpt-*/{MARKER}')):
                time.sleep(0.01)
            if kill and ctx.rank == kill[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)
        if remembers and ctx.is_main:
            ctx.state['seen'] = ctx.samples
        optimizer.zero_grad()
        loss = model(features).pow(2).sum()
        die('before backward')
        loss.backward()
        optimizer.step()
        schedule.step()


def ordered(folder: Path, number: int, shape: Shape, **how: Any) -> FragmentOrder:
    shapes = {**SHAPES, shape.ranks: shape}
    given = {'total_samples': TOTAL, 'shape': shape, 'shapes': shapes, 'trainer': folder.name}
    return order(folder, number, **{**given, **how})


@pytest.fixture(scope='module')
def undisturbed(fork_server: ForkClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last checkpoint of one rank that is not disturbed."""
    folder = tmp_path_factory.mktemp('alone')
    (outcome,) = all_finish(fork_server, ordered(folder, 1, Shape()), 1, folder, train)
    return str(outcome.path)


def fragment(
    nodes: Any, folder: Path, number: int, count: int, *, stop: bool = False, **how: Any
) -> tuple[Ranks, list[Any]]:
    of = ordered(folder, number, SHAPES[count])
    with ranks(nodes, of, count, folder, train, waits=True, **how) as gang:
        if stop:
            gang.hear(lambda: bool(gang.ranks[0].said(FragmentProgressed)))
            for rank in gang.ranks:
                rank.process.send(StopTraining('test'))
        return gang, gang.run()


def spoil(folder: Path, *writers: int) -> None:
    """Whoever reads these ranks' files of the newest checkpoint from the disk notices."""
    newest = max((folder / 'store').glob('ckpt-*'))
    for writer in writers:
        flip(newest / f'rank-{writer}.safetensors')


def sources(gang: Ranks) -> list[tuple[bool, bool, bool]]:
    """By rank: whether it used its node's memory, another rank's, and whether it read files."""
    found = []
    words = r'(\d+) bytes were in memory here, (\d+) came .* and (\d+) '
    for log in (rank.log.read_text() for rank in gang.ranks):
        told = re.search(words, log)
        assert told, log
        here, others, read = map(int, told.groups())
        found.append((here > 0, others > 0, read > 0))
    return found


def test_after_a_rescale_nothing_is_read_that_a_node_has_kept(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, undisturbed: str
) -> None:
    nodes = [fork_server, neighbour]
    _, outcomes = fragment(nodes, tmp_path, 1, 4, stop=True)
    assert [outcome.how for outcome in outcomes] == ['stopped'] * 4
    spoil(tmp_path, 0, 1, 2, 3)
    gang, outcomes = fragment(nodes, tmp_path, 2, 2)
    assert [outcome.how for outcome in outcomes] == ['finished'] * 2
    assert sources(gang) == [(True, True, False)] * 2
    assert same_weights(outcomes[0].path, undisturbed)


def test_what_went_with_its_node_is_read_from_the_same_checkpoint(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, undisturbed: str
) -> None:
    fragment([fork_server, neighbour], tmp_path, 1, 2, stop=True)
    spoil(tmp_path, 0)
    gang, outcomes = fragment([fork_server], tmp_path, 2, 1)
    assert sources(gang) == [(True, False, True)]
    assert same_weights(outcomes[0].path, undisturbed)


def test_after_a_kill_the_survivors_have_their_parts_of_the_last_checkpoint(
    fork_server: ForkClient, neighbour: ForkClient, tmp_path: Path, undisturbed: str
) -> None:
    nodes = [fork_server, neighbour]
    _, outcomes = fragment(nodes, tmp_path, 1, 2, kill=(1, ''))
    assert outcomes[1] is KILLED
    assert outcomes[0].how == 'peer-lost'
    spoil(tmp_path, 0)
    gang, outcomes = fragment(nodes, tmp_path, 2, 2)
    assert [outcome.how for outcome in outcomes] == ['finished'] * 2
    assert sources(gang) == [(True, False, True), (False, True, False)]  # rank 0 reads for both
    assert same_weights(outcomes[0].path, undisturbed)


TWICE = Shape(data=2, shard=2)


@pytest.mark.parametrize(
    ('kill', 'remembers'),
    [((1, 'forward'), True), pytest.param((0, 'before backward'), False, marks=pytest.mark.long)],
)
def test_with_copies_the_last_step_survives_a_kill(
    fork_server: ForkClient,
    neighbour: ForkClient,
    tmp_path: Path,
    undisturbed: str,
    kill: tuple[int, str],
    remembers: bool,
) -> None:
    nodes, how = [fork_server, neighbour], {'remembers': remembers}
    first = ordered(tmp_path, 1, TWICE)
    with ranks(nodes, first, 4, tmp_path, train, kill=kill, **how) as gang:
        outcomes = gang.run()
        assert bool(gang.ranks[0].said(StateUsed)) == remembers
        assert gang.ranks[1].said(FragmentStarted)[0].keeps
    assert outcomes[kill[0]] is KILLED
    left = [outcome.left for outcome in outcomes if outcome.left is not None]
    assert {(one.samples, one.parts) for one in left} == {(24, 2)}
    assert {one.part for one in left} == {0, 1}
    parts = tuple(tuple(one.digest for one in left if one.part == part) for part in range(2))
    following = ordered(tmp_path, 2, SHAPES[2], handover=Handover(parts, 24))
    with ranks(nodes, following, 2, tmp_path, train, **how) as gang:
        outcomes = gang.run()
        assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
        assert gang.ranks[0].said(FragmentStarted)[0].samples == 24
    assert same_weights(outcomes[0].path, undisturbed)


def stuck(ctx: FragmentContext) -> None:
    """Rank 1's writing thread never comes back, as with a file server that is gone."""

    def reached(stage: str) -> None:
        if stage == 'part-begun' and ctx.rank == 1:
            time.sleep(10_000)

    fault_hooks.on_saving.append(reached)
    part_writers._LEAST_S = 0.2
    ctx.after_step(lambda: time.sleep(0.2))  # which takes no processor meanwhile
    train(ctx)


def struck(
    server: ForkClient, folder: Path, function: Any, number: int = 1, samples: int = 10**6
) -> tuple[list[Any], list[str]]:
    """Without a total of its own, it saves as often as it can, one after the other."""
    how = {'total_samples': samples, 'checkpoint_every_s': 1e-9 if samples == 10**6 else 3600.0}
    with ranks(server, ordered(folder, number, SHAPES[2], **how), 2, folder, function) as gang:
        return gang.run(), [rank.log.read_text() for rank in gang.ranks]


def committed(folder: Path) -> int:
    return len(PosixCheckpointStore(folder / 'store', folder.name).checkpoints())


@pytest.mark.parametrize(
    ('rank', 'stage', 'kept'),
    [
        (0, 'before-commit', 1),
        (1, 'part-written', 2),
        pytest.param(0, 'committed', 2, marks=pytest.mark.long),
        pytest.param(1, 'part-data', 1, marks=pytest.mark.long),
    ],
)
def test_a_kill_leaves_the_checkpoint_before(
    fork_server: ForkClient, tmp_path: Path, rank: int, stage: str, kept: int
) -> None:
    last = fault_hooks.SAVING_STAGES[-1]
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
        assert struck(fork_server, tmp_path, train, 2, 40 * BATCH)[0][0].how == 'finished'


def test_a_rank_that_never_finishes(fork_server: ForkClient, tmp_path: Path) -> None:
    of = ordered(tmp_path, 1, SHAPES[2], total_samples=10**6, checkpoint_every_s=1e-9)
    with ranks(fork_server, of, 2, tmp_path, stuck) as gang:
        first = gang.ranks[0]
        gang.hear(lambda: first.status is not None)
        assert first.outcome.how == 'error'
        assert 'Ranks 1 have not written their parts' in first.outcome.error.message
    assert committed(tmp_path) == 0


@pytest.mark.parametrize('damage', [pytest.param('lost', marks=pytest.mark.long), 'flipped'])
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


WIDTH, FEW, MANY = 512, 4, 20
_M_MMAP_THRESHOLD = -3
MORE = 4 * WIDTH**2 * (MANY - FEW)
"""Bytes of the parameters by which the deeper model is larger."""


def deep(ctx: FragmentContext, blocks: int) -> None:
    # What malloc keeps of freed memory depends on the order of what is freed.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)
    with torch.device('meta'):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)]
    model = ctx.shard(nn.Sequential(*layers), blocks=(nn.Linear,))
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters()))
    for x in ctx.loop([torch.ones(WIDTH)] * 12, 4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.long
def test_a_rank_needs_memory_for_its_part(fork_server: ForkClient, tmp_path: Path) -> None:
    """Of two depths, so that libraries, exchanges and the gathered block cancel out: parameters,
    gradients, two moments, and the copy that a checkpoint makes of all but gradients.
    """

    def needed(blocks: int) -> list[int]:
        how = {'total_samples': 12, 'checkpoint_every_s': 1e-9, 'mode': 'throughput'}
        of = ordered(tmp_path / f'{blocks}', 1, SHAPES[2], **how)
        outcomes = ended(fork_server, of, 2, tmp_path / f'{blocks}', deep, blocks)
        return [outcome.memory for outcome in outcomes]

    both = zip(needed(FEW), needed(MANY), strict=True)
    parts = [(many - few) / (MORE / 2) for few, many in both]
    assert all(6.5 < part < 8.5 for part in parts), parts  # a rank that held all would have 14
