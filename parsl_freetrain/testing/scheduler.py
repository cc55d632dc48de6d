"""A scheduler that does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # ranks with faults import this, and need no Parsl
    from parsl_freetrain.sites.provider import BackfillProvider


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
