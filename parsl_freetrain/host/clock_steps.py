"""Notices that the computer's clock was set back: whatever is due at a time would be done late."""

from __future__ import annotations

from collections.abc import Callable

LEAST_S = 1.0
"""A clock that is merely adjusted goes back by less."""


class ClockSteps:
    """Looks now and then at a clock of seconds such as ``time.time()``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_s = clock()

    def set_back_s(self) -> float:
        """Seconds by which the clock was set back since the last look; 0 if it was not."""
        before, self._seen_s = self._seen_s, self._clock()
        return before - self._seen_s if self._seen_s < before - LEAST_S else 0.0
