"""How ranks end: which errors mean a lost rank, who notices, what gloo's threads do."""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import KILLED, finish, order, ranks
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
        from typing import Any

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
