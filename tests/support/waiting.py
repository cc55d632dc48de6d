"""Waiting for conditions, with a limit that only a broken thing reaches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 60.0

T = TypeVar('T')


def wait_until(condition: Callable[[], T], what: str = 'it did not come true', limit_s: float = LIMIT_S) -> T:
    """What the condition gives as soon as that is true; fails with ``what`` after ``limit_s`` seconds."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f'{what}, for {limit_s:g} s'
        threading.Event().wait(0.02)   # lets the threads of this process work, and signals come
    return found
