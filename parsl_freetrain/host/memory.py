"""Whether the kernel has ended processes because memory was full, and whom it should end first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
