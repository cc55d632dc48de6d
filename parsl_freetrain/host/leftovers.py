"""What ``multiprocessing`` of a killed manager leaves in /dev/shm, and who removes it."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFIX = 'freetrain-mp-'
SHARED = Path('/dev/shm')  # noqa: S108  # where Linux has named semaphores


@contextlib.contextmanager
def own_names() -> Iterator[None]:
    """Have ``multiprocessing`` use names that tell whose files are; remove dead managers'."""
    import multiprocessing  # who only removes needs none of it

    remove_leftovers()
    folder, lock = _locked_folder()
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config.update(tempdir=str(folder), semprefix=f'/{folder.name}')
    try:
        yield
    finally:
        _remove(folder)
        os.close(lock)


def remove_leftovers() -> None:
    for folder in SHARED.glob(f'{PREFIX}*'):
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


def _locked_folder() -> tuple[Path, int]:
    while True:
        folder = SHARED / f'{PREFIX}{secrets.token_hex(8)}'
        folder.mkdir(mode=0o700)
        # Until it is locked, others take it for that of a dead manager.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove(folder: Path) -> None:
    for semaphore in SHARED.glob(f'sem.{folder.name}-*'):
        with contextlib.suppress(OSError):
            semaphore.unlink()
    shutil.rmtree(folder, ignore_errors=True)
