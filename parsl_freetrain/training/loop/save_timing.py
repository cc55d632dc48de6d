"""When a fragment saves and when it must stop, by measured times; the thread that saves."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from parsl_freetrain.core.controller.overheads import FLOOR_S
from parsl_freetrain.training.comm.exchange_watch import exchanges
from parsl_freetrain.training.spec.fragment_order import FragmentOrder

ASSUMED_BYTES_PER_S = 200e6  # of a trainer's first checkpoint; most file systems are faster
NEAR_END_S = 1.0
"""Minimum age of the checkpoint before the last global batch, in seconds, for which another one is
written there. The last checkpoint is written when the user's function returns; a kill before that
repeats the work since this one.
"""
_RARE = 10  # kills are rare, while a wait for a checkpoint is certain
AHEAD_S = 1.0  # so long, a stop or a loss may take for computing the next step
_SHORT_S = 0.5  # so long, the last checkpoint may wait for one before it


class SaveTiming:
    """Measures steps and checkpoints, in seconds of ``time.monotonic()``; ``deadline``: when the
    nodes are taken away (infinite if unknown); ``measured_s``: the longest write of this fragment,
    or 0.
    """

    def __init__(self, order: FragmentOrder) -> None:
        self._order = order
        self._steps_s: deque[float] = deque(maxlen=8)
        self._first_step_s = 0.0
        self._expected_s = self.pause_s = self._tidying_s = 0.0
        self._saved_at, self._asked = time.monotonic(), False
        self.size, self.stepped_at, self.measured_s = 0, 0.0, 0.0
        self.deadline = math.inf if order.deadline is None else order.deadline

    def expect(self, size: int, longest_s: float) -> None:
        """Estimates for the first checkpoint: bytes, and earlier fragments' seconds (0: none)."""
        self.size, self._expected_s = size, longest_s or size / ASSUMED_BYTES_PER_S

    @property
    def longest_s(self) -> float:
        """Longest time to write a checkpoint in this fragment, or its estimate; in seconds."""
        return self.measured_s or self._expected_s

    @property
    def step_s(self) -> float:
        return max(self._steps_s, default=0.0)

    def begin(self) -> None:
        """A step begins. What is set up before it is repeated after a kill in any case."""
        if not (self.stepped_at or self._asked) and self._saved_at > -math.inf:
            self._saved_at = time.monotonic()

    def step_took(self, seconds: float) -> None:
        """A global batch has taken so long. The first, with its set-up, counts until the next."""
        if self.stepped_at:
            self._steps_s.append(seconds)
        else:
            self._first_step_s = seconds
            self.begin()
        exchanges.step_took(seconds)
        self.stepped_at = time.monotonic()

    def wrote(self, seconds: float, tidying_s: float = 0.0) -> None:
        self.measured_s = max(self.measured_s, seconds)
        self._tidying_s = max(self._tidying_s, tidying_s)

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def expected_step_s(self) -> float:
        """As :attr:`step_s`; the first step, which takes longer, where there was no other."""
        return max(self._steps_s, default=self._first_step_s)

    def writing_takes(self, seconds: float) -> bool:
        """Whether there is time to write, or ask, for ``seconds``, and a step, before the end."""
        seconds += self.expected_step_s
        enough = seconds + 2 * self.longest_s + FLOOR_S < self.time_left()
        return enough and seconds <= max(self.longest_s, AHEAD_S)

    def must_stop(self, steps_ahead: int, *, writing: bool) -> bool:
        """Whether time may be short after ``steps_ahead`` batches, and a save ``writing`` now."""
        margin_s = 2 * self.longest_s + steps_ahead * self.expected_step_s + FLOOR_S
        if writing:
            margin_s += self.longest_s + self._tidying_s
        return self.time_left() < margin_s

    def due(self, *, near_end: bool, steps_left: float) -> bool:
        """True once for each periodic one; ``near_end``: if a kill would cost more than it does."""
        every_s = min(self._order.spec.checkpoints.every_s, self._best_interval_s())
        if near_end:
            every_s = min(every_s, max(NEAR_END_S, self.pause_s + self.longest_s))
        # The last one waits until this one is written.
        left_s = steps_left * self.step_s if self.step_s else math.inf
        waits_s = self.pause_s + self.longest_s - left_s
        if waits_s > _SHORT_S:
            every_s = max(every_s, _RARE * waits_s)
        # Whether the nodes may be preempted as soon as a checkpoint can have been written.
        exempt_s = (self._order.exempt_until or 0.0) - time.monotonic()
        if 0 < exempt_s < 2 * self.longest_s + self.expected_step_s + FLOOR_S:
            every_s = min(every_s, NEAR_END_S)
        if self._asked or time.monotonic() - self._saved_at < every_s:
            return False
        self._asked = True
        return True

    def count_from_here(self) -> None:
        self._saved_at, self._asked = time.monotonic(), False

    def want_soon(self) -> None:
        self._saved_at = -math.inf

    def _best_interval_s(self) -> float:
        """Seconds between checkpoints for which they hold training up as much as interruptions are
        expected to cost (J. W. Young, Communications of the ACM 17(9), 1974), but so that nothing
        is written for half of the time; infinite where it is not known how often those come.
        """
        per_s = self._order.interruptions_per_s
        if not per_s:
            return math.inf
        cost_s = self.pause_s or self.longest_s
        return max(math.sqrt(2 * cost_s / per_s), 2 * self.longest_s, NEAR_END_S)


class Background:
    """Runs a job in a thread, which may be cut off; the next call raises its exception."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, *jobs: Callable[[], None]) -> None:
        """Wait for the previous jobs, then start these. Raises the previous jobs' exception."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=jobs, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the job, at most ``limit_s`` seconds, and raise its exception if it has one."""
        if self._thread is not None:
            self._thread.join(limit_s)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, *jobs: Callable[[], None]) -> None:
        try:
            for job in jobs:
                job()
        except BaseException as error:  # the main thread raises it
            self._error = error
