"""Signs of life: whether a process of this computer is stopped, and connections that break when the other end is gone.

Neither asks the process that is watched: one that is stopped cannot answer, and one that computes need not.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

_STOPPED = 'T'
_TIMEOUT_SHARE = 0.6    # of the patience; the rest is for the end of the other ranks


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or SIGTSTP; False for one that a debugger holds, and for none."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] == _STOPPED
    except (OSError, IndexError):
        return False


class StopWatch:
    """For how long a process has been seen stopped without a break; a short stop, as of a suspended job, is no harm."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid = pid
        self._clock = clock
        self._since: float | None = None

    def stopped_s(self) -> float:
        """Look once more; seconds since the first of the looks in a row that found it stopped, 0 if it runs."""
        now = self._clock()
        if not is_stopped(self._pid):
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since


def guard_connections(hang_s: float) -> int:
    """Have the kernel break every TCP connection of this process whose other end does not acknowledge any more.

    A connection counts as dead when data or probes have not been acknowledged for about 0.6 ``hang_s`` seconds. A peer that
    computes, or is stopped, acknowledges through its kernel, so slow steps break nothing; its node or network being gone does.

    Parameters
    ----------
    hang_s
        Seconds within which the end of a peer shall be noticed; at least 2.

    Returns
    -------
    int
        How many connections are guarded.
    """
    guarded = 0
    patience_s = _TIMEOUT_SHARE * hang_s
    probe_s = max(1, int(patience_s / 3))
    for entry in list(Path('/proc/self/fd').iterdir()):
        try:
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                    continue
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
                # Also what is sent and never acknowledged; without it the kernel tries for a quarter of an hour.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_s))
                guarded += 1
        except OSError:
            continue  # closed meanwhile, as the folder that lists them is
    return guarded
