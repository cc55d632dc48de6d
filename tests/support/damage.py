"""Damage to checkpoints and to their disk, and a scheduler that does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import create
from parsl_freetrain.sites.provider import BackfillProvider
from parsl_freetrain.training.checkpoint.directories import directories, fresh, key
from parsl_freetrain.training.checkpoint.manifest import MARKER, is_committed

_BLOCK = 65536


def corrupt_checkpoint(folder: str | Path, *, seed: int = 0, bits: int = 1) -> Path:
    """Flip bits in the largest file of a checkpoint, as a bad disk does.

    Parameters
    ----------
    folder
        A checkpoint's directory, or a trainer's folder, whose newest committed checkpoint is taken.
    seed
        Seed of :class:`random.Random`, which chooses the bits.
    bits
        Number of bits.

    Returns
    -------
    Path
        The file that was damaged.

    Raises
    ------
    BadInput
        If there is nothing to damage.
    """
    folder = Path(folder)
    found = (
        folder
        if is_committed(folder)
        else next((path for path in reversed(directories(folder)) if is_committed(path)), None)
    )
    files = [
        path
        for path in (found.rglob('*') if found is not None else ())
        if path.is_file() and path.name != MARKER
    ]
    if not any(path.stat().st_size for path in files):
        raise BadInput(
            f'{folder} holds no checkpoint that could be damaged: name one, or the '
            'folder of a trainer that has one.'
        )
    victim = max(sorted(files), key=lambda path: path.stat().st_size)
    draw = random.Random(seed)
    with victim.open('r+b') as file:
        for _ in range(bits):
            place = draw.randrange(victim.stat().st_size)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
        file.flush()
        os.fsync(file.fileno())
    return victim


def half_write_checkpoint(folder: str | Path) -> Path:
    """Make a copy of a trainer's newest committed checkpoint without its marker and with half of
    its largest file.

    Its name says one sample more, as if a fragment had died while writing it. Returns the
    directory. Raises BadInput if there is no committed checkpoint.
    """
    folder = Path(folder)
    newest = next((path for path in reversed(directories(folder)) if is_committed(path)), None)
    if newest is None:
        raise BadInput(
            f'{folder} holds no checkpoint that could be left half-written: name the '
            'folder of a trainer that has one.'
        )
    samples, fragment = key(newest)[:2]
    half = fresh(folder, samples + 1, fragment)
    files = [path for path in newest.rglob('*') if path.is_file() and path.name != MARKER]
    largest = max(files, key=lambda path: path.stat().st_size)
    for path in files:
        data = path.read_bytes()
        target = half / path.relative_to(newest)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.write_bytes(data[: len(data) // 2] if path == largest else data)
    return half


@contextlib.contextmanager
def full_disk(folder: str | Path, limit: int = 1 << 30) -> Iterator[None]:
    """Fill the file system of ``folder``, to the last byte, until the block ends.

    Parameters
    ----------
    folder
        A folder on a small file system that nothing else uses.
    limit
        Maximum number of free bytes; if there are more, nothing is filled.

    Raises
    ------
    BadInput
        If more bytes are free.
    """
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free > limit:
        raise BadInput(
            f'{folder} is on a file system with {free} bytes free, more than '
            f'limit={limit}; use a small one, '
            f'such as a tmpfs with size=64m.'
        )
    filler = Path(folder) / f'.filler-{secrets.token_hex(8)}'
    try:
        with create(filler) as file:
            for size in (_BLOCK, 4096, 1):
                with contextlib.suppress(_Full):
                    while True:
                        _write(file.fileno(), size)
            yield
    finally:
        filler.unlink()


class _Full(Exception):
    """The disk is full."""


def _write(fd: int, size: int) -> None:
    try:
        os.write(fd, bytes(size))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _Full from error
        raise


def scheduler_silent_for(
    provider: BackfillProvider, seconds: float, clock: Callable[[], float] = time.monotonic
) -> threading.Event:
    """Make queries for jobs fail for some seconds, as if the scheduler did not answer.

    Returns
    -------
    threading.Event
        Set when the scheduler was asked in that time.
    """
    asked = threading.Event()
    until = clock() + seconds
    site: Any = provider.site
    answer = site.statuses

    def statuses(job_ids: list[str]) -> Any:
        if clock() < until:
            asked.set()
            raise TimeoutError('the scheduler does not answer, as a test wants it')
        if site.__dict__.get('statuses') is statuses:
            del site.statuses
        return answer(job_ids)

    site.statuses = statuses
    return asked
