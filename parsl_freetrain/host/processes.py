"""Processes in ``/proc``, their memory, and signals and TCP connections of this one."""

import os
import resource
import signal
import socket
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

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
        with suppress(OSError):
            fd = int(entry.name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
                if tcp and sock.type == socket.SOCK_STREAM:
                    yield sock


_COUNTER = 'oom_kill'
_BEATS = 10  # on a busy computer it takes a process some seconds to end, and its parent to notice
_FIRST = 500  # of 1000: as if it used half of all memory more (proc_pid_oom_score_adj(5))
SECOND = 250  # of a fork server: before whoever started it, and after its ranks


def oom_kills(pid: int | str = 'self', root: Path = Path('/')) -> tuple[Path, int]:
    """The file and count of processes that the kernel ended for memory: a cgroup's or all."""
    for path in (*_counters(root / f'proc/{pid}/cgroup', root), root / 'proc/vmstat'):
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, number = line.partition(' ')
                if name == _COUNTER:
                    return path, int(number)
    return root, 0


class OomWatch:
    """Notices kills for full memory in the cgroup of ``pid``, lately: slots share a count."""

    def __init__(self, pid: int | str = 'self', root: Path = Path('/')) -> None:
        self._pid, self._root = pid, root
        self._file, now = oom_kills(pid, root)
        self._before = deque([now], maxlen=_BEATS)

    def beat(self) -> None:
        file, now = oom_kills(self._pid, self._root)
        if file != self._file:  # it is in another cgroup now
            self._file, self._before = file, deque([0], maxlen=_BEATS)
        self._before.append(now)

    def struck(self) -> bool:
        file, now = oom_kills(self._pid, self._root)
        struck = now > (self._before[0] if file == self._file else 0)
        if struck:
            self._file, self._before = file, deque([now], maxlen=_BEATS)
        return struck


def end_me_first(score: int = _FIRST) -> None:
    """If memory is full, let the kernel choose this process before its parent, which tells why."""
    with suppress(OSError):  # no /proc, or the site forbids it: the choice is the kernel's
        Path('/proc/self/oom_score_adj').write_text(str(score))


def _counters(groups: Path, root: Path) -> Iterator[Path]:
    """The files of a process's cgroups that may have the count, of cgroup v1 and of v2."""
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(':', 2)
            if 'memory' in controllers.split(','):
                yield root / 'sys/fs/cgroup/memory' / path.lstrip('/') / 'memory.oom_control'
            elif not controllers:
                yield root / 'sys/fs/cgroup' / path.lstrip('/') / 'memory.events'


SIGNALS = signal.SIGTERM, signal.SIGHUP


class StopSignals:
    """The first of these signals raises SystemExit, unless the program handles or ignores it."""

    def __init__(self) -> None:
        self._pid, self._ending = os.getpid(), False

    def begin(self) -> None:
        """Has no effect in another thread than the main one."""
        with suppress(ValueError):
            for one in SIGNALS:
                if signal.getsignal(one) is signal.SIG_DFL:
                    signal.signal(one, self._end_by)

    def end(self) -> None:
        with suppress(ValueError):
            for one in SIGNALS:
                if signal.getsignal(one) == self._end_by:
                    signal.signal(one, signal.SIG_DFL)

    def _end_by(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked from it
            os._exit(128 + number)
        if not self._ending:
            self._ending = True
            raise SystemExit(128 + number)
