"""Functions of the Linux kernel that Python does not provide, and whether processes live."""

import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain
from pathlib import Path

from parsl_freetrain.host import processes

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_UNKILLABLE_S = 5.0  # a process that waits for a dead file system does not end


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have a signal sent when the parent's thread that forked this process ends; raises OSError."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, in any session. Raises OSError as well."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_freed_memory() -> None:
    """Have glibc keep up to 1 GiB of freed memory: each step would return and zero it."""
    if any(name.startswith('MALLOC_') or name == 'GLIBC_TUNABLES' for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, 2**30)
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest that glibc allows


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f'prctl({option}, {value})')


def end_descendants(spared: Collection[int] = ()) -> None:
    """SIGKILL all descendants of this process, which adopts orphans; it must not wait for any.
    ``spared``: children that stay, with all of theirs.
    """
    until = time.monotonic() + _UNKILLABLE_S
    parents = {os.getpid()}
    while (found := _descendants(os.getpid(), spared)) and time.monotonic() < until:
        # All at once: a process may take a while to die, and its children become ours only then.
        for pid in found:
            if _kill_if(pid, lambda found: found.parent in parents):
                parents.add(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def _descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Parents before their children. Where the kernel does not list children, only the children."""
    try:
        lists = Path(f'/proc/{pid}/task').glob('[0-9]*/children')
        listed = [path.read_text().split() for path in lists]
    except OSError:  # it has ended
        return []
    if not listed and pid == os.getpid():
        every = ((other, processes.status(other)) for other in processes.process_ids())
        return [i for i, found in every if found and found.parent == pid and i not in spared]
    children = set(map(int, chain(*listed))).difference(spared)
    return [i for child in children for i in (child, *_descendants(child))]


def _kill_if(pid: int, condition: Callable[[processes.ProcessStatus], bool]) -> bool:
    """False if the condition does not hold, or the process has ended."""
    with contextlib.suppress(OSError):
        # Opened before the check, so that the checked process is the one that is killed.
        pidfd = os.pidfd_open(pid)
        try:
            found = processes.status(pid)
            if found is not None and found.alive and condition(found):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False


_TIMEOUT_SHARE = 0.6  # of hang_s; the rest is for the end of the other ranks


class StopWatch:
    """For how long a process has been stopped. A short stop (a suspended job) does no harm."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._clock = pid, clock
        self._since: float | None = None

    def stopped_s(self) -> float:
        """Check once more: seconds since the first check in a row that found it so, or 0."""
        now = self._clock()
        if not processes.is_stopped(self._pid):
            self._since = None
            return 0.0
        self._since = now if self._since is None else self._since
        return now - self._since


def connections() -> set[tuple[object, object]]:
    found: set[tuple[object, object]] = set()
    for sock in processes.tcp_sockets():
        with suppress(OSError):  # it only listens, or was closed meanwhile
            found.add((sock.getsockname(), sock.getpeername()))
    return found


def end_connections(which: Collection[tuple[object, object]]) -> None:
    """Shut down some of :func:`connections`; the other ends notice it at once."""
    for sock in processes.tcp_sockets():
        with suppress(OSError):
            if (sock.getsockname(), sock.getpeername()) in which:
                sock.shutdown(socket.SHUT_RDWR)


def guard_connections(hang_s: float) -> int:
    """Have the kernel break TCP connections of this process, and return their number: dead without
    an acknowledgement for 0.6 ``hang_s`` seconds (at least 2). A computing or stopped peer's kernel
    acknowledges, so slow steps break nothing; a lost node or network does not.
    """
    guarded = 0
    patience_s = _TIMEOUT_SHARE * hang_s
    probe_s = max(1, int(patience_s / 3))
    for sock in processes.tcp_sockets():
        with suppress(OSError):  # closed meanwhile
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
            # Also for unacknowledged data, which the kernel would repeat for a quarter of an hour.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * patience_s))
            guarded += 1
    return guarded
