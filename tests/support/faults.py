"""More faults inside ranks than users have."""

import contextlib
import signal
import socket
import time

from parsl_freetrain.host.processes import tcp_sockets
from parsl_freetrain.testing import Fault, signalling
from parsl_freetrain.training.checkpoint.fault_hooks import SAVING_STAGES


def stop_at(rank: int, step: int, *, after_s: float = 0.0, fragment: int | None = 1) -> Fault:
    """A rank gets SIGSTOP ``after_s`` seconds after a step begins: it keeps its connections."""
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
    """A rank gets SIGKILL in its n-th checkpoint, after the first of two ``SAVING_STAGES``."""
    assert SAVING_STAGES.index(after) < SAVING_STAGES.index(before)
    kill = signalling(signal.SIGKILL, 0.0)
    return Fault(rank, fragment, kill, stage=after, checkpoint=checkpoint)


def _shut_down_connections() -> None:
    for sock in tcp_sockets():
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
