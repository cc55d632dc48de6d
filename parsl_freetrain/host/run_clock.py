"""The clock of a run, which no step of the computer's clock moves."""

from __future__ import annotations

import time
from collections.abc import Callable

from parsl_freetrain.host.clock_steps import LEAST_S


class RunClock:
    """Seconds since the epoch, by the computer's clock when the run began. A step of that clock
    would make what was just heard an hour old, and what is due in a second due in an hour.
    """

    def __init__(
        self, wall: Callable[[], float] | None = None, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._wall, self._steady = wall or time.time, steady
        self._began = self._wall() - steady()

    def __call__(self) -> float:
        return self._began + self._steady()

    @property
    def ahead_s(self) -> float:
        """By how much the computer's clock was set ahead since the run began; 0: by less than
        :data:`~parsl_freetrain.host.clock_steps.LEAST_S`.
        """
        ahead_s = self._wall() - self()
        return ahead_s if abs(ahead_s) > LEAST_S else 0.0

    def of_wall(self, at: float | None) -> float | None:
        """A time of the computer's clock, such as the end of a job, in the run's."""
        return None if at is None else at - self.ahead_s
