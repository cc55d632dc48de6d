"""When a fragment saves and when it must stop: learned from how long things take."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.core.worth import FLOOR_S
from parsl_freetrain.training.background import Background
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.fragment import FragmentOrder
from parsl_freetrain.training.leaving import Leaving
from parsl_freetrain.training.snapshot import Snapshots
from parsl_freetrain.training.state import State
from parsl_freetrain.training.store import CheckpointStore

log = logging.getLogger(__name__)

ASSUMED_BYTES_PER_S = 200e6  # of a checkpoint that has never been written; slower than most file systems
_STEPS = 8


class Keeper:
    """Saves checkpoints of one fragment; only rank 0 has one that does.

    A checkpoint in the midst of training is copied, and written by a thread while training goes on; one at a time. What the thread
    raises is raised at the next step.

    Parameters
    ----------
    leaving
        Leaves the state in memory when the fragment stops; None: it is not left.
    """

    def __init__(self, store: CheckpointStore, order: FragmentOrder, channel: Channel, last: Checkpoint | None,
                 leaving: Leaving | None = None) -> None:
        self._store = store
        self._order = order
        self._channel = channel
        self._background = Background('checkpoint')
        self._leaving = leaving
        self._stepped_at = 0.0
        self._snapshots = Snapshots()
        self._saved_at = time.monotonic()
        self._asked = False
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._expected_s = 0.0
        self._longest_s = 0.0
        self._tidying_s = 0.0
        self.last = last

    def expect(self, size: int, longest_s: float) -> None:
        """What is known before the first checkpoint: the state's size in bytes, and the longest time of earlier fragments (0: none)."""
        self._expected_s = longest_s or size / ASSUMED_BYTES_PER_S

    @property
    def longest_s(self) -> float:
        """The longest that writing a checkpoint has taken in this fragment, or what was expected; in seconds."""
        return self._longest_s or self._expected_s

    def step_took(self, seconds: float) -> None:
        """Take in how long a global batch took."""
        self._steps_s.append(seconds)
        self._stepped_at = time.time()

    def last_words(self) -> dict[str, Any]:
        """What the executor goes on with.

        When the last step ended (epoch seconds), the longest of the last steps and the longest checkpoint (seconds), 0 where unknown; and
        what was left in memory, as :class:`~parsl_freetrain.training.leaving.Leaving` has it.
        """
        return {'stepped_at': self._stepped_at, 'step_s': max(self._steps_s, default=0.0), 'checkpoint_s': self._longest_s,
                'left': self._leaving.left if self._leaving is not None else None}

    def time_left(self) -> float:
        """Seconds until the nodes go; infinite where unknown."""
        return math.inf if self._order.deadline is None else self._order.deadline - time.time()

    def must_stop(self, steps_ahead: int) -> bool:
        """Whether, after ``steps_ahead`` more global batches, there might not be time to save."""
        margin_s = 2 * self.longest_s + steps_ahead * max(self._steps_s, default=0.0) + FLOOR_S
        if self._background.busy:
            margin_s += self.longest_s + self._tidying_s  # which the last one has to wait for
        return self.time_left() < margin_s

    def wants_to_save(self) -> bool:
        """Whether it is time for a periodic checkpoint; True once for each, and not while one is being written.

        Raises
        ------
        FreeTrainError
            If the one before could not be written.
        """
        if self._background.busy:
            return False
        self._background.check()
        if self._asked or time.monotonic() - self._saved_at < self._order.checkpoint_every_s:
            return False
        self._asked = True
        return True

    def went_back(self) -> None:
        """Take in that the state is that of the last checkpoint again."""
        self._count_from_here()

    def save_beside(self, collect: Callable[[], State | None], samples: int, metrics: Mapping[str, float]) -> None:
        """Copy the state, and commit a checkpoint of it beside training; the rest as in :meth:`save_now`."""
        began = time.monotonic()
        state, numbers = self._collected(collect), dict(metrics)
        if state is not None:
            copied = self._snapshots.take(state)
            pause_s = time.monotonic() - began
            self._background.start(lambda: self._commit(copied, samples, numbers, lambda: pause_s))
        self._count_from_here()

    def save_now(self, collect: Callable[[], State | None], samples: int, metrics: Mapping[str, float]) -> None:
        """Commit a checkpoint, tell the member, and let go of old ones.

        Parameters
        ----------
        collect
            Gives the state; None: this rank does not write it.
        samples, metrics
            As in :class:`~parsl_freetrain.core.words.Checkpoint`.

        Raises
        ------
        Fenced
            If a later fragment has begun.
        FreeTrainError
            If it cannot be written, or the one before could not.
        """
        began = time.monotonic()
        state = self._collected(collect)
        if state is not None:
            self._commit(state, samples, metrics, lambda: time.monotonic() - began)
        self._count_from_here()

    def save_and_stop(self, collect: Callable[[], State | None], samples: int, metrics: Mapping[str, float]) -> None:
        """Commit the fragment's last checkpoint, and leave the state in memory too; the rest as in :meth:`save_now`.

        All ranks call it together. Old checkpoints stay for the next fragment to let go of, since that takes time.
        """
        began, leaving = time.monotonic(), self._leaving
        if leaving is not None:
            leaving.agree()
        state = self._collected(collect)
        if state is not None:
            if leaving is not None:
                self._background.start(lambda: leaving.leave(state, samples))
            self._commit(state, samples, metrics, lambda: time.monotonic() - began, tidy=False)
            self._background.wait()
        if leaving is not None:
            leaving.take(samples)

    def settled(self) -> Checkpoint | None:
        """The last checkpoint, after waiting for one that is being written; where that fails it is the one before."""
        try:
            self._background.wait()
        except FreeTrainError:
            log.exception('The last checkpoint was not written')
        return self.last

    def _collected(self, collect: Callable[[], State | None]) -> State | None:
        self._background.wait()
        return collect()

    def _count_from_here(self) -> None:
        self._saved_at = time.monotonic()
        self._asked = False

    def _commit(self, state: State, samples: int, metrics: Mapping[str, float], pause_s: Callable[[], float], *,
                tidy: bool = True) -> None:
        began = time.monotonic()
        try:
            self.last = self._store.save(state.write, samples=samples, fragment=self._order.fragment, metrics=metrics)
        except OSError as error:
            raise FreeTrainError(f'The checkpoint of trainer {self._order.trainer!r} at {samples} samples cannot be written to '
                                 f'{self._order.store} ({error.strerror or error}); the one before is still there.') from error
        seconds = time.monotonic() - began
        self._longest_s = max(self._longest_s, seconds)
        # 'seconds' is what a stop has to allow for, 'pause' what training was held up for.
        self._channel.send({'kind': 'checkpoint', 'path': self.last.path, 'samples': samples, 'metrics': dict(metrics),
                            'seconds': seconds, 'pause': pause_s(), 'at': time.time()})
        if tidy:
            try:
                self._store.prune(self._order.keep)
            except OSError:
                log.warning('Old checkpoints in %s could not be removed', self._order.store, exc_info=True)
            self._tidying_s = max(self._tidying_s, time.monotonic() - began - seconds)
