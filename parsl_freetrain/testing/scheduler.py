"""A scheduler that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from parsl_freetrain.sites.provider import BackfillProvider


def scheduler_silent_for(provider: BackfillProvider, seconds: float, clock: Callable[[], float] = time.monotonic) -> threading.Event:
    """From now on questions about jobs fail, as if the scheduler did not answer; after so many seconds they are answered again.

    Returns
    -------
    threading.Event
        Set when it was asked in that time.
    """
    asked = threading.Event()
    until = clock() + seconds
    inner = provider.provider
    answer = inner.status

    def status(job_ids: list[Any]) -> Any:
        if clock() < until:
            asked.set()
            raise TimeoutError('the scheduler does not answer, as a test wants it')
        if inner.__dict__.get('status') is status:
            del inner.status
        return answer(job_ids)
    inner.status = status
    return asked
