"""Waiting for conditions, within ``LIMIT_S``; promised times: ``under_load(promised_s)``."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

LIMIT_S = 600.0

T = TypeVar('T')


def wait_until(
    condition: Callable[[], T], what: str = 'it did not come true', limit_s: float = LIMIT_S
) -> T:
    """The condition's value as soon as it is true; fails with ``what`` after ``limit_s``."""
    for _ in looks(limit_s):
        if found := condition():
            return found
    raise AssertionError(f'{what}, for {limit_s:g} s')


def looks(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Moments to look at a condition, for ``limit_s``, for a tenth of a processor at most."""
    end = time.monotonic() + limit_s
    while (begun := time.monotonic()) < end:
        yield
        pause_s = min(max(0.02, 9.0 * (time.monotonic() - begun)), 1.0)
        threading.Event().wait(pause_s)  # lets this process's other threads run and signals arrive


def slowness() -> float:
    """How many times longer than on an idle computer an operation may well take now."""
    waiting_per_cpu = max(os.getloadavg()) / (os.cpu_count() or 1)
    return 1.0 + waiting_per_cpu / 1.5


def under_load(seconds: float) -> float:
    """The limit, in seconds, for what takes at most ``seconds`` on an idle computer."""
    return 3.0 * seconds * slowness()
