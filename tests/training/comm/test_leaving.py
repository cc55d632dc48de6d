"""A rank ends whatever the threads of gloo are doing at that moment."""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.ranks import finish, order, ranks


def test_a_rank_ends_while_a_thread_of_gloo_still_works(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    """The last owner of a process group waits in C++ for gloo's threads, and holds Python's lock.
    One of the threads may wait for that lock: it needs it to drop the last reference to a tensor.
    """

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
