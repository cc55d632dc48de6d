"""Waiting for conditions, with a limit that only a broken thing reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

LIMIT_S = 30.0


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f'did not come true within {LIMIT_S} s'
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
