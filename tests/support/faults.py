"""More faults inside ranks than users have."""

from __future__ import annotations

import contextlib
import signal
import socket
import time

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.processes import tcp_sockets
from parsl_freetrain.testing import Fault, signalling
from parsl_freetrain.training.checkpoint import fault_hooks


def stop_at(rank: int, step: int, *, after_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """A rank gets SIGSTOP ``after_s`` seconds after a step begins: it keeps its connections but
    does nothing.
    """
    return Fault(rank, fragment, signalling(signal.SIGSTOP, after_s), step)


def slow_rank(
    rank: int, seconds_per_step: float, *, step: int = 0, fragment: int | None = None
) -> Fault:
    """Every step of a rank takes ``seconds_per_step`` longer, from ``step`` on."""
    return Fault(rank, fragment, lambda: time.sleep(seconds_per_step), step, every=True)


def disconnect_at(rank: int, step: int, *, fragment: int | None = 1) -> Fault:
    """All TCP connections of a rank are shut down in both directions; the rank itself continues."""
    return Fault(rank, fragment, _shut_down_connections, step)


def kill_between(
    after: str = 'written',
    before: str = 'committed',
    *,
    rank: int = 0,
    checkpoint: int = 1,
    fragment: int | None = 1,
) -> Fault:
    """A rank that saves gets SIGKILL between two stages of its n-th checkpoint, right after the
    first of them.

    Parameters
    ----------
    after, before
        Stages: 'begin' (the directory exists), 'written' (the data), 'manifest' (their digests),
        'before-commit', 'committed' (the marker). If all ranks write, each of them passes after
        'begin': 'part-begun', 'part-data' (its tensors), 'part-written' (rank 0 has been told).
    rank
        Ranks other than 0 save only if the trainer has shapes that divide parameters, and then only
        up to 'part-written'.

    Raises
    ------
    BadInput
        If they are not stages in this order.
    """
    stages = fault_hooks.SAVING_STAGES
    if after not in stages or before not in stages or stages.index(after) >= stages.index(before):
        raise BadInput(
            f'kill_between({after!r}, {before!r}): name two of the stages '
            f'{", ".join(stages)}, in this order.'
        )
    return Fault(
        rank, fragment, signalling(signal.SIGKILL, 0.0), stage=after, checkpoint=checkpoint
    )


def _shut_down_connections() -> None:
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
