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
    """One process at one moment; the start time tells it from a later one of its number."""

    state: str  # one letter, as in proc(5)
    parent: int
    session: int  # its leader's process id
    start: str

    @property
    def alive(self) -> bool:
        return self.state not in _DEAD


def status(pid: int) -> ProcessStatus | None:
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
    """Whether it is stopped by SIGSTOP or SIGTSTP, not by a debugger; False if there is none."""
    found = status(pid)
    return found is not None and found.state == _STOPPED


def process_ids() -> set[int]:
    return {int(entry.name) for entry in Path('/proc').iterdir() if entry.name.isdigit()}


def allow_open_files() -> None:
    """Raise this process's limit of open files: whoever connects to a port takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tcp_sockets() -> Iterator[socket.socket]:
    """The open TCP sockets of this process, as duplicates that are closed one by one."""
    for entry in list(Path('/proc/self/fd').iterdir()):
        with contextlib.suppress(OSError):
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and sock.type == socket.SOCK_STREAM:
                    yield sock
