"""A lock for all test sessions on a machine."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock, for instance to look for free ports."""
    with Path(tempfile.gettempdir(), f'ft-alone-{os.getuid()}.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
