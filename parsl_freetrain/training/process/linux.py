"""Functions of the Linux kernel that Python does not provide."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from parsl_freetrain.host.processes import process_ids, status

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (precisely: the parent's thread that
    forked it).

    Raises
    ------
    OSError
        If the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), 'prctl(PR_SET_PDEATHSIG)')


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
