"""What only the Linux kernel can do for us."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (to be exact, the parent's thread that forked it).

    Raises
    ------
    OSError
        If the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), 'prctl(PR_SET_PDEATHSIG)')


def end_session() -> None:
    """SIGKILL the other processes of the session that this process leads, if it leads one."""
    me = os.getpid()
    if os.getsid(0) != me:
        return
    killed: set[int] = set()
    while True:
        # Between a look and the kill a process may have started another one.
        found = {int(entry.name) for entry in Path('/proc').iterdir() if entry.name.isdigit()} - killed - {me}
        members = {pid for pid in found if _kill_member(pid, me)}
        if not members:
            return
        killed |= members


def _kill_member(pid: int, session: int) -> bool:
    """Kill a process of the session; False if it is none, or over already."""
    with contextlib.suppress(OSError):
        # Opened before the look, so that what is killed is what was looked at.
        pidfd = os.pidfd_open(pid)
        try:
            state, _, _, its_session = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[:4]
            if int(its_session) == session and state not in 'ZX':
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                return True
        finally:
            os.close(pidfd)
    return False
