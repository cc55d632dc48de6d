"""How ranks end: which errors mean a lost rank, who notices, what gloo's threads do; and that what
asks torch.distributed takes itself for alone in reproducible mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parsl_freetrain import FragmentContext, load_weights
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.examples import equal
from tests.support.ranks import KILLED, all_finish, finish, order, ranks
from tests.support.waiting import wait_until


def all_have_begun(ctx: FragmentContext, folder: Path) -> None:
    """Wait for the others, without an exchange."""
    (folder / f'begun-{ctx.rank}').touch()
    wait_until(lambda: len([*folder.glob('begun-*')]) == ctx.world_size)


def test_an_error_of_its_own_is_not_a_lost_rank(fork_server: ForkClient, tmp_path: Path) -> None:
    """It would be repeated in fragment after fragment, and nobody would hear of it."""

    def train(ctx: FragmentContext) -> None:
        import torch

        ctx._run.peers.broadcast([torch.ones(2, 2).to_sparse()])

    with ranks(fork_server, order(tmp_path), 2, tmp_path, train) as gang:
        outcomes = gang.run()
    assert {outcome.how for outcome in outcomes} == {'error'}, outcomes
    assert outcomes[0].error.type != 'PeerLost'


def test_a_rank_behind_the_next_one_notices_it(fork_server: ForkClient, tmp_path: Path) -> None:
    """And not when that one has left its state and ended."""

    def train(ctx: FragmentContext, noticed: Path, late: Path) -> None:
        import os
        import signal
        from contextlib import suppress

        import torch

        outcome = ctx._run.outcome

        def slow(*arguments: Any) -> Any:
            with suppress(AssertionError):
                wait_until(noticed.exists)
                late.unlink()
            return outcome(*arguments)

        if ctx.rank == 1:
            vars(ctx._run)['outcome'] = slow
        all_have_begun(ctx, noticed.parent)
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ctx._run.peers.recv(torch.zeros(1), ctx.rank - 1)
        finally:
            if ctx.rank == 2:
                noticed.touch()

    noticed, late = tmp_path / 'noticed', tmp_path / 'late'
    late.touch()
    with ranks(fork_server, order(tmp_path), 3, tmp_path, train, noticed, late) as gang:
        assert [outcome.how for outcome in gang.run()] == [KILLED.how, 'peer-lost', 'peer-lost']
    assert not late.exists()


def test_an_exchange_that_does_not_end_is_ended(fork_server: ForkClient, tmp_path: Path) -> None:
    """gloo forgets now and then to wake who waits for a connection that breaks."""

    def train(ctx: FragmentContext) -> None:
        import os
        import signal
        import threading

        from parsl_freetrain.training.comm.exchange_watch import exchanges

        all_have_begun(ctx, tmp_path)
        if ctx.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with exchanges.exchange('gather'):
            threading.Event().wait()

    with ranks(fork_server, order(tmp_path), 2, tmp_path, train) as gang:
        assert [outcome.how for outcome in gang.run()] == [KILLED.how, 'peer-lost']
        assert 'waits in gather for one that is gone' in gang.ranks[1].log.read_text()


def test_a_rank_ends_while_gloo_still_works(fork_server: ForkClient, tmp_path: Path) -> None:
    """The last owner of a group waits in C++, with Python's lock, for threads of gloo."""

    def train(ctx: FragmentContext) -> None:
        import threading
        import time

        import torch
        import torch.distributed as dist

        dropped = threading.Event()
        real_barrier, rank = dist.barrier, ctx.rank  # what holds ctx keeps all of it

        class SlowToGo(torch.Tensor):
            def __del__(self) -> None:
                dropped.set()
                time.sleep(3)

        def barrier(*_: object) -> None:  # the last exchange of a rank
            real_barrier()
            if rank:
                time.sleep(0.5)
            # Rank 0 drops its reference before the exchange is done, so gloo's thread has the last.
            dist.all_reduce(torch.ones(1).as_subclass(SlowToGo), async_op=True)
            dropped.wait(30)

        dist.barrier = barrier  # type: ignore[assignment]
        finish(ctx)

    with ranks(fork_server, order(tmp_path, mode='throughput'), 2, tmp_path, train) as gang:
        assert [outcome.how for outcome in gang.run()] == ['finished'] * 2
        assert [rank.status for rank in gang.ranks] == [0, 0]


def train(ctx: FragmentContext, asked: bool = False, *, unasked: bool = False) -> None:
    """A loss as MACE's exchanges the number of samples; the set-up exchanges, too."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    ranks: list[Any] = [0] * ctx.world_size
    if dist.is_initialized():
        dist.all_gather_object(ranks, ctx.rank)
    assert ranks == list(range(ctx.world_size))
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if asked:
        number = torch.tensor([ctx.rank])
        dist.all_reduce(number, group=ctx.torch_distributed())
        assert number.item() == sum(range(ctx.world_size))
    if unasked:
        dist.barrier()
    for x in ctx.loop(torch.arange(36.0).reshape(18, 2) / 36, 6):
        optimizer.zero_grad()
        number = torch.tensor(float(len(x)))
        if dist.is_initialized():
            dist.all_reduce(number)
        (model(x).square().sum() / number).backward()
        optimizer.step()


def test_a_loss_that_exchanges(fork_server: ForkClient, tmp_path: Path) -> None:
    """With different numbers of shards on two ranks, which would wait for each other."""

    def result(world_size: int) -> Any:
        ordered = order(tmp_path / f'{world_size}', shards=3, total_samples=36)
        return load_weights(all_finish(fork_server, ordered, world_size, tmp_path, train)[0].path)

    assert equal(result(1), result(2))


@pytest.mark.parametrize('world_size', [1, 2])
def test_exchanges_are_refused(fork_server: ForkClient, tmp_path: Path, world_size: int) -> None:
    ordered = order(tmp_path, shards=3, total_samples=36)
    with ranks(fork_server, ordered, world_size, tmp_path, train, True) as gang:
        outcomes = gang.run()
    assert {outcome.error.type for outcome in outcomes} <= {'BadInput', 'PeerLost'}
    told = [o.error.message for o in outcomes if o.error.type == 'BadInput']
    assert told and all('torch.distributed (allreduce of a process group)' in text for text in told)


def test_the_hidden_group_is_refused_by_name(fork_server: ForkClient, tmp_path: Path) -> None:
    with ranks(fork_server, order(tmp_path), 2, tmp_path, train, unasked=True) as gang:
        told = [outcome.error for outcome in gang.run()]
    assert {error.type for error in told} <= {'BadInput', 'PeerLost'}
    assert any('say ctx.torch_distributed() before' in error.message for error in told)
