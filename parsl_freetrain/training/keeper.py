"""When a fragment saves and when it must stop: learned from how long things take."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.fragment import FragmentOrder
from parsl_freetrain.training.store import CheckpointStore

log = logging.getLogger(__name__)

FLOOR_S = 0.5
ASSUMED_BYTES_PER_S = 200e6  # of a checkpoint that has never been written; slower than most file systems
_STEPS = 8


class Keeper:
    """Saves checkpoints of one fragment; only rank 0 has one that does."""

    def __init__(self, store: CheckpointStore, order: FragmentOrder, channel: Channel, last: Checkpoint | None) -> None:
        self._store = store
        self._order = order
        self._channel = channel
        self._saved_at = time.monotonic()
        self._asked = False
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._expected_s = 0.0
        self._saves_s: list[float] = []
        self.last = last

    def expect(self, size: int, longest_s: float) -> None:
        """What is known before the first checkpoint: the state's size in bytes, and the longest time of earlier fragments (0: none)."""
        self._expected_s = longest_s or size / ASSUMED_BYTES_PER_S

    @property
    def longest_s(self) -> float:
        """The longest that a checkpoint has taken in this fragment, or what was expected; in seconds."""
        return max(self._saves_s, default=self._expected_s)

    def step_took(self, seconds: float) -> None:
        """Take in how long a global batch took."""
        self._steps_s.append(seconds)

    def time_left(self) -> float:
        """Seconds until the nodes go; infinite where unknown."""
        return math.inf if self._order.deadline is None else self._order.deadline - time.time()

    def must_stop(self, steps_ahead: int) -> bool:
        """Whether, after ``steps_ahead`` more global batches, there might not be time to save."""
        margin_s = 2 * self.longest_s + steps_ahead * max(self._steps_s, default=0.0) + FLOOR_S
        return self.time_left() < margin_s

    def wants_to_save(self) -> bool:
        """Whether it is time for a periodic checkpoint; True once for each."""
        if self._asked or time.monotonic() - self._saved_at < self._order.checkpoint_every_s:
            return False
        self._asked = True
        return True

    def save(self, write: Callable[[Path], None], samples: int, metrics: Mapping[str, float], *, tidy: bool) -> None:
        """Commit a checkpoint, tell the member, and (``tidy``; it takes time) let go of old ones.

        Raises
        ------
        Fenced
            If a later fragment has begun.
        """
        began = time.monotonic()
        self.last = self._store.save(write, samples=samples, fragment=self._order.fragment, metrics=metrics)
        seconds = time.monotonic() - began
        self._saves_s.append(seconds)
        self._channel.send({'kind': 'checkpoint', 'path': self.last.path, 'samples': samples, 'metrics': dict(metrics),
                            'seconds': seconds, 'at': time.time()})
        if tidy:
            try:
                self._store.prune(self._order.keep_checkpoints)
            except OSError:
                log.warning('Old checkpoints in %s could not be removed', self._order.store, exc_info=True)
        self._saved_at = time.monotonic()
        self._asked = False
