"""What Linux says in ``/proc`` about processes, and the TCP connections of this one."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STOPPED, _DEAD = 'T', 'ZX'


@dataclass(frozen=True)
class ProcessStatus:
    """One process at one moment.

    Attributes
    ----------
    state
        One letter, as in proc(5).
    parent
        Process id of the parent.
    session
        Process id of the session's leader.
    start
        The kernel's start time. It tells a process from a later one with the same number, and does
        not move when the clock is set.
    """

    state: str
    parent: int
    session: int
    start: str

    @property
    def alive(self) -> bool:
        """Whether it is neither dead nor a zombie."""
        return self.state not in _DEAD


def status(pid: int) -> ProcessStatus | None:
    """The status of a process; None if there is no such process."""
    try:
        # The program's name comes before the last parenthesis, and may hold anything.
        fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return ProcessStatus(fields[0], int(fields[1]), int(fields[3]), fields[19])
    except (OSError, IndexError):
        return None


def start_of(pid: int) -> str:
    """The kernel's start time of a process; empty if there is none, or it is dead."""
    found = status(pid)
    return found.start if found is not None and found.alive else ''


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP or SIGTSTP. False if a debugger holds it, or there is
    no such process.
    """
    found = status(pid)
    return found is not None and found.state == _STOPPED


def process_ids() -> set[int]:
    """The ids of all processes of this computer."""
    return {int(entry.name) for entry in Path('/proc').iterdir() if entry.name.isdigit()}


def allow_open_files() -> None:
    """Raise this process's limit of open files to the maximum that it may have.

    Whoever can connect to a port of this process takes one of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tcp_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, each as a duplicate that is closed before the next one.

    Sockets that were closed meanwhile are skipped.
    """
    for entry in list(Path('/proc/self/fd').iterdir()):
        with contextlib.suppress(OSError):
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and sock.type == socket.SOCK_STREAM:
                    yield sock
