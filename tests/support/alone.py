"""One after the other on a machine, whatever session of tests asks."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone() -> Iterator[None]:
    """Alone on this machine: for apt-get, and for whoever looks for free ports."""
    with Path(tempfile.gettempdir(), f'ft-alone-{os.getuid()}.lock').open('w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
