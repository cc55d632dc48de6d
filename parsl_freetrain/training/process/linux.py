"""Functions of the Linux kernel that Python does not provide."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from parsl_freetrain.host.processes import process_ids, status

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_UNKILLABLE_S = 5.0  # a process that waits for a dead file system does not end


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (precisely: the parent's
    thread that forked it).

    Raises
    ------
    OSError
        If the kernel refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own, whatever session it is in.

    Raises
    ------
    OSError
        If the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def keep_freed_memory() -> None:
    """Have glibc keep memory that is freed, up to 1 GiB, in place of returning it to the kernel at
    once. Gradients and activations are freed in every step: their pages would be given back, asked
    for and zeroed again. Does nothing where the environment tunes malloc, or without glibc.
    """
    if any(name.startswith('MALLOC_') or name == 'GLIBC_TUNABLES' for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, 2**30)
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest that glibc allows


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f'prctl({option}, {value})')


def end_descendants() -> None:
    """SIGKILL all descendants of this process, which adopts orphans; it must not wait for any."""
    me = os.getpid()
    until = time.monotonic() + _UNKILLABLE_S
    # The children of a killed child become ours.
    while children := {
        pid for pid in process_ids() if (found := status(pid)) is not None and found.parent == me
    }:
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # ours, hence not another one with its number
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            return
        time.sleep(0.001)


def end_session() -> None:
    """SIGKILL the other processes of this process's session, if it leads one."""
    me = os.getpid()
    if os.getsid(0) != me:
        return
    killed: set[int] = set()
    while True:
        # Between listing and killing, a process may have started another one.
        found = process_ids() - killed - {me}
        members = {pid for pid in found if _kill_member(pid, me)}
        if not members:
            return
        killed |= members


def _kill_member(pid: int, session: int) -> bool:
    """Kill a process if it is in the session; False if it is not, or has ended."""
    with contextlib.suppress(OSError):
        # Opened before the check, so that the checked process is the one that is killed.
        pidfd = os.pidfd_open(pid)
        try:
            found = status(pid)
            if found is not None and found.alive and found.session == session:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False
