"""Whether a process of this computer is stopped, and TCP connections that break when the other end
is gone. Neither asks the watched process: a stopped one cannot answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from parsl_freetrain.host.processes import is_stopped, tcp_sockets

_TIMEOUT_SHARE = 0.6  # of hang_s; the rest is for the end of the other ranks


class StopWatch:
    """For how long a process has been stopped. A short stop (a suspended job) does no harm."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._clock = pid, clock
        self._since: float | None = None

    def stopped_s(self) -> float:
        """Check once more: seconds since the first check in a row that found it so, or 0."""
        now = self._clock()
        if not is_stopped(self._pid):
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since


def connections() -> set[tuple[object, object]]:
    """The TCP connections of this process, by the addresses of both ends."""
    found: set[tuple[object, object]] = set()
    for sock in tcp_sockets():
        with suppress(OSError):  # it only listens, or was closed meanwhile
            found.add((sock.getsockname(), sock.getpeername()))
    return found


def end_connections(which: Collection[tuple[object, object]]) -> None:
    """Shut down some of :func:`connections`; the other ends notice it at once."""
    for sock in tcp_sockets():
        with suppress(OSError):
            if (sock.getsockname(), sock.getpeername()) in which:
                sock.shutdown(socket.SHUT_RDWR)


def guard_connections(hang_s: float) -> int:
    """Have the kernel break TCP connections of this process, and return their number. One counts as
    dead when data or probes are not acknowledged for about 0.6 ``hang_s`` seconds, which are at
    least 2. A computing or stopped peer's kernel still acknowledges, so slow steps break nothing; a
    lost node or network does not.
    """
    guarded = 0
    patience_s = _TIMEOUT_SHARE * hang_s
    probe_s = max(1, int(patience_s / 3))
    for sock in tcp_sockets():
        with suppress(OSError):  # closed meanwhile
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
            # Also for unacknowledged data, which the kernel would repeat for a quarter of an hour.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_s))
            guarded += 1
    return guarded
