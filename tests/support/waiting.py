"""Waiting for conditions, with one limit that only a hang reaches.

No test measures with ``LIMIT_S``: an operation of a second on an idle computer may take two minutes
at a load average of 16. For promised times, tests compare with ``under_load(promised_s)``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 600.0

T = TypeVar('T')


def wait_until(
    condition: Callable[[], T], what: str = 'it did not come true', limit_s: float = LIMIT_S
) -> T:
    """Return the condition's value as soon as it is true; fail with ``what`` after ``limit_s``
    seconds.
    """
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f'{what}, for {limit_s:g} s'
        threading.Event().wait(0.02)  # lets this process's other threads run and signals arrive
    return found


def under_load(seconds: float) -> float:
    """Return the limit, in seconds, for an operation that takes at most ``seconds`` on an idle
    computer.
    """
    waiting_per_cpu = max(os.getloadavg()) / (os.cpu_count() or 1)
    return seconds * (3.0 + 2.0 * waiting_per_cpu)
