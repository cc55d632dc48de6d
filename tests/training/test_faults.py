"""The faults strike where they say, once, and nowhere else."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from parsl_freetrain import FragmentContext
from parsl_freetrain.testing import disk_full_at, fail_at, kill_at, preempt_at, with_faults
from parsl_freetrain.training.checkpoint.directories import directories
from parsl_freetrain.training.checkpoint.manifest import is_committed
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.spec.messages import Outcome
from tests.support.faults import disconnect_at, kill_between
from tests.support.ranks import KILLED, Ranks, order, ranks
from tests.training.loop.test_fragments import BATCH, SIZE, Images, network, train

TOTAL = 3 * SIZE
STEP = 4


def store(folder: Path) -> PosixCheckpointStore:
    return PosixCheckpointStore(folder / 'store', 'digits')


def run(
    fork_server: ForkClient, folder: Path, *faults: Any, world_size: int = 2, fragment: int = 1
) -> Ranks:
    ordered = order(folder, fragment, total_samples=TOTAL, checkpoint_every_s=1e-9)
    with ranks(fork_server, ordered, world_size, folder, with_faults(train, *faults)) as gang:
        gang.run()
        return gang


def hows(gang: Ranks) -> list[str | None]:
    return [outcome.how for rank in gang.ranks for outcome in rank.said(Outcome) or [KILLED]]


def test_it_fails_at_that_step_of_that_rank_alone(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = run(fork_server, tmp_path, fail_at(1, STEP))
    assert hows(gang) == ['peer-lost', 'error']
    assert gang.ranks[1].outcome.error.type == 'InjectedFault'
    assert gang.ranks[1].outcome.samples >= STEP * BATCH - BATCH
    gang = run(fork_server, tmp_path, fail_at(1, STEP), fragment=2)
    assert hows(gang) == ['finished'] * 2


def test_it_counts_the_steps_of_a_data_loader(fork_server: ForkClient, tmp_path: Path) -> None:
    def with_loader(ctx: FragmentContext) -> None:
        torch.manual_seed(0)
        model = network()
        loader = torch.utils.data.DataLoader(Images(), BATCH)
        model, optimizer, loader = ctx.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.05), loader
        )
        for _ in ctx.epochs():
            for images, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(images), labels).backward()
                optimizer.step()

    ordered = order(tmp_path, 1, total_samples=TOTAL, checkpoint_every_s=1e-9)
    faulty = with_faults(with_loader, fail_at(0, STEP))
    with ranks(fork_server, ordered, 1, tmp_path, faulty) as gang:
        gang.run()
        assert gang.ranks[0].outcome.error.type == 'InjectedFault'
        assert STEP * BATCH <= gang.ranks[0].outcome.samples < (STEP + 1) * BATCH


def test_it_kills_and_disconnects(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = run(fork_server, tmp_path / 'kill', kill_at(0, STEP))
    assert gang.ranks[0].status == -signal.SIGKILL
    assert hows(gang) == [None, 'peer-lost']
    gang = run(fork_server, tmp_path / 'cut', disconnect_at(1, STEP))
    assert gang.ranks[0].outcome.how == 'peer-lost'
    assert all(rank.status != 0 for rank in gang.ranks)


def test_a_preemption_with_a_grace_saves(fork_server: ForkClient, tmp_path: Path) -> None:
    ordered = order(tmp_path, total_samples=10_000_000)
    told = with_faults(train, preempt_at(0.5, grace_s=30.0))
    with ranks(fork_server, ordered, 2, tmp_path, told) as gang:
        gang.run()
    assert hows(gang) == ['stopped'] * 2
    ordered = order(tmp_path / 'now', total_samples=10_000_000)
    with ranks(fork_server, ordered, 1, tmp_path, with_faults(train, preempt_at(0.5))) as gang:
        gang.run()
    assert gang.ranks[0].status == -signal.SIGKILL


@pytest.mark.parametrize('after', ['begin', 'before-commit'])
def test_it_kills_before_committing(fork_server: ForkClient, tmp_path: Path, after: str) -> None:
    fault = kill_between(after, 'committed', checkpoint=2)
    gang = run(fork_server, tmp_path, fault, world_size=1)
    assert gang.ranks[0].status == -signal.SIGKILL
    left = directories(tmp_path / 'store')
    assert [is_committed(path) for path in left] == [True, False]
    assert hows(run(fork_server, tmp_path, world_size=1, fragment=2)) == ['finished']


def test_a_full_disk_costs_only_what_was_not_saved(fork_server: ForkClient, tmp_path: Path) -> None:
    gang = run(fork_server, tmp_path, disk_full_at(1000, checkpoint=2), world_size=1)
    error = gang.ranks[0].outcome.error
    assert 'cannot be written' in error.message
    latest = store(tmp_path).latest()
    assert latest is not None
    assert len(directories(tmp_path / 'store')) == 1  # nothing half-written takes up the room
    assert hows(run(fork_server, tmp_path, world_size=1, fragment=2)) == ['finished']
