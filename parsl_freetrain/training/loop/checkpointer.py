"""When a fragment saves and when it must stop, based on measured times."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from parsl_freetrain.core.controller.shortest_hole import FLOOR_S
from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.snapshot import Snapshots
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.checkpoint.store import CheckpointStore
from parsl_freetrain.training.comm.exchange_watch import exchanges
from parsl_freetrain.training.comm.part_writers import PartWriters
from parsl_freetrain.training.loop.background import Background
from parsl_freetrain.training.loop.handover_send import Leaving, LeavingPart
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.messages import (
    CheckpointSaved,
    Ending,
    Outcome,
    RankError,
    SavingCheckpoint,
    ToRank,
)

log = logging.getLogger(__name__)

ASSUMED_BYTES_PER_S = (
    200e6  # assumed for a trainer's first checkpoint; slower than most file systems
)
_STEPS = 8
NEAR_END_S = 1.0
"""Maximum age of the checkpoint before the last global batch, in seconds. The last checkpoint is
written when the user's function returns; a kill before that repeats the work since this one.
"""


LARGE_BYTES = 50_000_000
"""From this size on, a state that is left in memory is committed by the next fragment, if that is
ready. Smaller ones take little time.
"""


class Checkpointer:
    """Decides when to save and when to stop, and saves the checkpoints of one fragment. Rank 0
    writes them, or all ranks together.

    A checkpoint during training is a copy of the state, which a thread writes while training
    continues. There is one such thread at a time. Its errors are raised at the next step.

    Parameters
    ----------
    leaving
        Leaves the state in memory when the fragment stops; None: the state is not left there.
    writers
        The ranks that write together; None: rank 0 writes alone.
    leaving_part
        Leaves this rank's part in memory when the fragment stops or another rank is lost.
    """

    def __init__(
        self,
        store: CheckpointStore,
        order: FragmentOrder,
        channel: Channel[ToRank],
        last: Checkpoint | None,
        leaving: Leaving | None = None,
        writers: PartWriters | None = None,
        leaving_part: LeavingPart | None = None,
    ) -> None:
        self._store = store
        self._order = order
        self._channel = channel
        self._background = Background('checkpoint')
        self._leaving = leaving
        self._writers, self._leaving_part = writers, leaving_part
        self._save = 0
        self._stepped_at = 0.0
        self._snapshots = Snapshots(in_file=leaving_part is not None)
        self._saved_at = time.monotonic()
        self._asked = False
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._first_step_s = 0.0
        self._expected_s = 0.0
        self._size = 0
        self._begun_with_uncommitted = self._only_in_memory = False
        self._longest_s = self._pause_s = 0.0
        self._tidying_s = 0.0
        self.last = last

    def expect(self, size: int, longest_s: float) -> None:
        """Set the estimates that hold before the first checkpoint: the state's size in bytes, and
        the longest writing time in earlier fragments in seconds (0: none).
        """
        self._size, self._expected_s = size, longest_s or size / ASSUMED_BYTES_PER_S

    @property
    def longest_s(self) -> float:
        """Longest time to write a checkpoint in this fragment, or its estimate; in seconds."""
        return self._longest_s or self._expected_s

    def step_took(self, seconds: float) -> None:
        """Record the duration of a global batch. The first one includes compilation and the set-up
        of communicators, so it counts only until there is another.
        """
        if self._stepped_at:
            self._steps_s.append(seconds)
        else:
            self._first_step_s = seconds
        exchanges.step_took(seconds)
        self._stepped_at = time.time()

    def outcome(
        self, how: Ending, error: RankError | None, samples: int, metrics: Mapping[str, float]
    ) -> Outcome:
        """The last message of the rank. Waits for a checkpoint that is being written."""
        limit_s = None
        if self._writers is not None and how not in ('finished', 'stopped'):
            limit_s = self._writers.peer_lost()
        last = self.settled(limit_s)
        if self._leaving_part is not None and how in ('stopped', 'peer-lost'):
            self._leaving_part.leave()
        return Outcome(
            how,
            samples,
            path=last.path if last is not None and not self._only_in_memory else None,
            metrics=dict(metrics),
            error=error,
            stepped_at=self._stepped_at,
            step_s=max(self._steps_s, default=0.0),
            checkpoint_s=self._longest_s,
            left=self._leaving.left if self._leaving is not None else None,
        )

    def time_left(self) -> float:
        """Seconds until the nodes are taken away; infinite if unknown."""
        return math.inf if self._order.deadline is None else self._order.deadline - time.time()

    def must_stop(self, steps_ahead: int) -> bool:
        """Whether there may be too little time to save after ``steps_ahead`` more batches."""
        step_s = max(self._steps_s, default=self._first_step_s)
        margin_s = 2 * self.longest_s + steps_ahead * step_s + FLOOR_S
        if self._background.busy:
            margin_s += self.longest_s + self._tidying_s  # the last checkpoint has to wait for it
        return self.time_left() < margin_s

    def wants_to_save(self, *, near_end: bool = False) -> bool:
        """Whether it is time for a periodic checkpoint: True once for each, and never while another
        is being written. ``near_end``: one that is not older than :data:`NEAR_END_S` is wanted.
        Raises FreeTrainError if the previous checkpoint could not be written.
        """
        if self._background.busy:
            return False
        self._background.check()
        every_s = min(self._order.spec.checkpoints.every_s, self._best_interval_s())
        if near_end or self._exemption_ends():
            every_s = min(every_s, NEAR_END_S)
        if self._asked or time.monotonic() - self._saved_at < every_s:
            return False
        self._asked = True
        return True

    def _best_interval_s(self) -> float:
        """Seconds between checkpoints for which they hold training up as much as interruptions are
        expected to cost (J. W. Young, Communications of the ACM 17(9), 1974), but so that nothing
        is written for half of the time; infinite where it is not known how often those come.
        """
        per_s = self._order.interruptions_per_s
        if not per_s:
            return math.inf
        cost_s = self._pause_s or self.longest_s
        return max(math.sqrt(2 * cost_s / per_s), 2 * self.longest_s, NEAR_END_S)

    def _exemption_ends(self) -> bool:
        """Whether the nodes may be preempted as soon as a checkpoint can have been written."""
        until = self._order.exempt_until
        margin_s = 2 * self.longest_s + max(self._steps_s, default=self._first_step_s) + FLOOR_S
        return until is not None and 0 < until - time.time() < margin_s

    def save_soon(self) -> None:
        """Want a checkpoint at the first opportunity: the state is newer than the last one."""
        self._saved_at, self._begun_with_uncommitted = -math.inf, True

    def went_back(self) -> None:
        """Record that the state is that of the last checkpoint again."""
        self._count_from_here()

    def save_beside(
        self, collect: Callable[[], State | None], samples: int, metrics: Mapping[str, float]
    ) -> None:
        """Copy the state, and commit it as a checkpoint while training continues. Otherwise as
        :meth:`save_now`.
        """
        began = time.monotonic()
        state, numbers = self._collected(collect), dict(metrics)
        if state is not None:
            copied = self._snapshots.take(state)
            pause_s, save = time.monotonic() - began, self._save
            self._pause_s = pause_s
            self._background.start(
                lambda: self._commit(copied, save, samples, numbers, lambda: pause_s)
            )
        self._count_from_here()

    def save_now(
        self, collect: Callable[[], State | None], samples: int, metrics: Mapping[str, float]
    ) -> None:
        """Commit a checkpoint, report it to the node agent, and delete old ones.

        Parameters
        ----------
        collect
            Returns the state, or None on ranks that do not write it.
        samples, metrics
            As in :class:`~parsl_freetrain.core.model.types.Checkpoint`.

        Raises
        ------
        Fenced
            If a later fragment has begun.
        FreeTrainError
            If this checkpoint or the previous one cannot be written.
        """
        began = time.monotonic()
        state = self._collected(collect)
        if state is not None:
            self._commit(state, self._save, samples, metrics, lambda: time.monotonic() - began)
        self._count_from_here()

    def save_and_stop(
        self,
        collect: Callable[[], State | None],
        samples: int,
        metrics: Mapping[str, float],
        *,
        wanted: bool = False,
    ) -> None:
        """Commit the fragment's last checkpoint, and also leave the state in memory. Otherwise as
        :meth:`save_now`.

        All ranks call it together. Deleting old checkpoints takes time, so it is left to the next
        fragment. If that is ready, committing a large state is left to it too: until then the
        checkpoint before is what a kill leaves. Not if the user wants this checkpoint (``wanted``,
        or that of every nth fragment), and not if what this fragment began with is not committed.
        """
        began, leaving = time.monotonic(), self._leaving
        if leaving is not None:
            leaving.agree()
        state = self._collected(collect)
        if state is not None:
            if self._leaving_part is not None and self._leaving_part.possible():
                state = self._snapshots.take(state)
            else:
                state = self._snapshots.on_cpu(state)  # once for both
            by_next = (
                leaving is not None
                and self._size >= LARGE_BYTES
                and not (wanted or self._begun_with_uncommitted)
                and self._order.spec.checkpoints.retention.every is None
                and leaving.followed()
            )
            if leaving is not None:
                self._background.start(partial(leaving.leave, state, samples))
                if by_next:
                    self._background.wait()
                    self._only_in_memory = leaving.left is not None
            if not self._only_in_memory:
                self._commit(
                    state,
                    self._save,
                    samples,
                    metrics,
                    lambda: time.monotonic() - began,
                    tidy=False,
                )
            self._background.wait()
        if leaving is not None:
            leaving.take(samples)

    def settled(self, limit_s: float | None = None) -> Checkpoint | None:
        """The last checkpoint, after waiting for one that is being written, at most ``limit_s``
        seconds. If that one fails, the checkpoint before it.
        """
        try:
            self._background.wait(limit_s)
        except FreeTrainError:
            log.exception('The last checkpoint was not written')
        return self.last

    def _collected(self, collect: Callable[[], State | None]) -> State | None:
        self._background.wait()
        with exchanges.not_followed():
            return self._collect(collect)

    def _collect(self, collect: Callable[[], State | None]) -> State | None:
        if self._writers is None:
            return collect()
        self._save = self._writers.begin()
        try:
            return collect()
        except BaseException as error:
            self._writers.refuse(self._save, error)
            raise

    def _count_from_here(self) -> None:
        self._saved_at = time.monotonic()
        self._asked = False

    def _commit(
        self,
        state: State,
        save: int,
        samples: int,
        metrics: Mapping[str, float],
        pause_s: Callable[[], float],
        *,
        tidy: bool = True,
    ) -> None:
        began, writers = time.monotonic(), self._writers
        try:
            if writers is not None and writers.rank > 0:
                writers.follow(save, state)
                self._longest_s = max(self._longest_s, time.monotonic() - began)
                return  # rank 0 commits and tells
            self._channel.send(SavingCheckpoint())
            self.last = self._store.save(
                state.write
                if writers is None
                else lambda folder: writers.lead(save, folder, state),
                samples=samples,
                fragment=self._order.fragment,
                metrics=metrics,
            )
        except OSError as error:
            if writers is not None:
                writers.refuse(save, error)
            raise FreeTrainError(
                f'The checkpoint of trainer {self._order.trainer!r} at {samples} samples '
                'cannot be written to '
                f'{self._order.store} ({error.strerror or error}); the one before is still there.'
            ) from error
        except BaseException as error:
            if writers is not None:
                writers.refuse(save, error)
            raise
        seconds = time.monotonic() - began
        self._longest_s, self._begun_with_uncommitted = max(self._longest_s, seconds), False
        self._channel.send(
            CheckpointSaved(
                self.last.path,
                samples,
                dict(metrics),
                seconds=seconds,
                pause_s=pause_s(),
                at=time.time(),
            )
        )
        if tidy:
            try:
                self._store.prune(self._order.spec.checkpoints.retention)
            except OSError:
                log.warning(
                    'Old checkpoints in %s could not be removed', self._order.store, exc_info=True
                )
            self._tidying_s = max(self._tidying_s, time.monotonic() - began - seconds)
