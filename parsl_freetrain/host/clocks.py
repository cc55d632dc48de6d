"""Clocks: of a run, of the computer, which may be set back, and of nodes; and waits that grow."""

import logging
import time
from collections.abc import Callable


class Backoff:
    """Pauses that double from the first to the longest; ``failures``: since the last success."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s, self._next_s = first_s, longest_s, first_s
        self.failures = 0

    def failed(self) -> float:
        """Count a failure; returns the seconds to wait before the next try."""
        pause_s = min(self._next_s, self._longest_s)
        self._next_s = 2 * pause_s
        self.failures += 1
        return pause_s

    def reset(self) -> None:
        self._next_s, self.failures = self._first_s, 0


logger = logging.getLogger(__name__)

LEAST_S = 1.0  # a clock that is merely adjusted goes back by less
WARN_S = 2.0  # difference of two clocks, in seconds, that is worth a warning


class RunClock:
    """Seconds since the epoch, by the clock of the run's start: its steps change no deadline."""

    def __init__(
        self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._steady = wall or time.time, steady
        self._began = self._wall() - steady()

    def __call__(self) -> float:
        return self._began + self._steady()

    @property
    def ahead_s(self) -> float:
        """How far the clock was set ahead since the run began; 0: by less than :data:`LEAST_S`."""
        ahead_s = self._wall() - self()
        return ahead_s if abs(ahead_s) > LEAST_S else 0.0

    def of_wall(self, at: float | None) -> float | None:
        """A time of the computer's clock, such as the end of a job, in the run's."""
        return None if at is None else at - self.ahead_s


class ClockSteps:
    """Notices that a clock of seconds was set back: whatever is due at a time would be late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_s = clock()

    def set_back_s(self) -> float:
        """Seconds by which the clock was set back since the last look; 0 if it was not."""
        before, self._seen_s = self._seen_s, self._clock()
        return before - self._seen_s if self._seen_s < before - LEAST_S else 0.0


class NodeClocks:
    """The differences of nodes' clocks, for users to see; nothing depends on them."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def measured(self, node: str, sent_at: float, clock: float, heard_at: float) -> None:
        """A node read its clock between two times of this run: warn once if it is off."""
        ahead_s = clock - heard_at if clock > heard_at else min(0.0, clock - sent_at)
        if not clock or abs(ahead_s) < WARN_S:
            self._warned.discard(node)
        elif node not in self._warned:
            self._warned.add(node)
            off = f'{abs(ahead_s):.0f} s {"ahead of" if ahead_s > 0 else "behind"}'
            logger.warning(
                f"The clock of node {node} is {off} the submitting computer's. Training does not "
                'depend on it, but schedulers and file times may: have it set (NTP).'
            )
