"""A scheduler's answers that all runs of one user on one computer share, so that one of them asks.

They are in the folder that systemd makes for a user who is logged in, private and in memory; where
there is none, each run asks for itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


@dataclass
class Sharing:
    """``not_before``: older answers than to questions of this time do not do. ``asked_at``: when
    the oldest question was asked whose answer was used. In seconds of ``clock``.
    """

    clock: Callable[[], float]
    not_before: float
    asked_at: float = math.inf


_now: ContextVar[Sharing | None] = ContextVar('sharing', default=None)


@contextmanager
def shared(clock: Callable[[], float], not_before: float) -> Iterator[Sharing]:
    """What is asked in here may be answered from what another run was told."""
    token = _now.set(sharing := Sharing(clock, not_before))
    try:
        yield sharing
    finally:
        _now.reset(token)


def answer(
    command: Sequence[str], environment: Mapping[str, str], ask: Callable[[], str], wait_s: float
) -> str:
    """The answer to a command, from another run's question if that is new enough, else from
    ``ask``. A run that asks at the moment is waited for, for ``wait_s`` seconds.
    """
    if (sharing := _now.get()) is None:
        return ask()
    with _file(command, environment) as file:
        locked = file is not None and _locked(file, wait_s)
        if locked and file is not None:
            time_of, _, said = file.read().partition(b'\n')
            with suppress(ValueError):
                if sharing.not_before < (at := float(time_of)) <= sharing.clock():
                    sharing.asked_at = min(sharing.asked_at, at)
                    return said.decode()
        at = sharing.clock()
        sharing.asked_at = min(sharing.asked_at, at)
        found = ask()
        if locked and file is not None:
            with suppress(OSError):
                file.seek(0)
                file.truncate()
                file.write(b'%r\n' % at + found.encode())
                file.flush()
        return found


@contextmanager
def _file(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[BinaryIO | None]:
    """The file for this question to this scheduler; None if there can be none."""
    folder = Path(os.environ.get('XDG_RUNTIME_DIR') or f'/run/user/{os.getuid()}')
    which = hashlib.sha256(repr((command, sorted(environment.items()))).encode()).hexdigest()
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(folder / f'freetrain-{which[:32]}', flags, 0o600)
    except OSError:
        yield None
        return
    with os.fdopen(fd, 'r+b') as file:
        found = os.fstat(fd)
        yield file if found.st_uid == os.getuid() and not found.st_mode & 0o077 else None


def _locked(file: BinaryIO, wait_s: float) -> bool:
    end = time.monotonic() + wait_s
    while True:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end:
            return False  # its run was stopped
        time.sleep(0.05)
