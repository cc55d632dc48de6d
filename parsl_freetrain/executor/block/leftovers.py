"""What ``multiprocessing`` of a node's manager leaves when it is killed: named semaphores in
/dev/shm, and a folder of sockets.

A scheduler that takes a node kills all of its processes at once, also the one that would tidy up.
So the next manager of the same user on the node does it.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = 'freetrain-mp-'
SEMAPHORES = Path('/dev/shm')  # noqa: S108  # where Linux has named semaphores


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Have ``multiprocessing`` use names by which a later manager knows whose its files are. They
    are removed at the end, and those of dead managers now.
    """
    remove_leftovers()
    draft = Path(tempfile.mkdtemp(prefix=f'.{PREFIX}'))
    lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Under this name it is found by others, so not before it is locked.
    folder = draft.rename(draft.with_name(draft.name.removeprefix('.')))
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config.update(tempdir=str(folder), semprefix=f'/{folder.name}')
    try:
        yield
    finally:
        _remove(folder)
        os.close(lock)


def remove_leftovers() -> None:
    """Remove the files of this user's managers that have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f'{PREFIX}*'):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                # The kernel frees the lock when the last process that holds it has ended.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(fd)


def _remove(folder: Path) -> None:
    for semaphore in SEMAPHORES.glob(f'sem.{folder.name}-*'):
        with contextlib.suppress(OSError):
            semaphore.unlink()
    shutil.rmtree(folder, ignore_errors=True)
