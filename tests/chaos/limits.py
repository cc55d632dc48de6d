"""Limits of a cgroup, where root may make one: of memory, and of the number of processes."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path('/sys/fs/cgroup')
LIMITS = {'memory': ('memory.limit_in_bytes', 'memory.max'), 'pids': ('pids.max', 'pids.max')}


def _mount(kind: str) -> tuple[Path, str]:
    """Where groups are made, and the file of the limit: version 1, or 2."""
    old, new = LIMITS[kind]
    return (ROOT / kind, old) if (ROOT / kind).is_dir() else (ROOT, new)


def possible() -> bool:
    """Whether groups can be made here."""
    groups = [_mount(kind)[0] / f'freetrain-try-{os.getpid()}' for kind in LIMITS]
    try:
        for group in groups:
            group.mkdir()
        return all((g / _mount(kind)[1]).exists() for g, kind in zip(groups, LIMITS, strict=True))
    except OSError:
        return False
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                group.rmdir()


@contextlib.contextmanager
def limited(kind: str, most: int, pids: Iterable[int]) -> Iterator[None]:
    """A group with a limit for these processes: ``most`` more bytes, or processes and threads."""
    mount, limit = _mount(kind)
    group = mount / f'freetrain-chaos-{os.getpid()}-{time.monotonic_ns()}'
    group.mkdir()
    try:
        _move(pids, group)
        if kind == 'pids':
            most += int((group / 'pids.current').read_text())
        (group / limit).write_text(str(most))
        yield
    finally:
        # What cannot leave the group, since it begins just now, must not stay limited.
        (group / limit).write_text('-1' if limit == LIMITS['memory'][0] else 'max')
        for _ in range(100):
            with contextlib.suppress(OSError):
                _move(map(int, (group / 'cgroup.procs').read_text().split()), mount)
                group.rmdir()
                break
            time.sleep(0.05)


def _move(pids: Iterable[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            (group / 'cgroup.procs').write_text(str(pid))
