"""The checkpoints of one fragment."""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.events import CheckpointSaved
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.training.checkpoint.frozen import Frozen
from parsl_freetrain.training.checkpoint.handed_in import forget, hand_in
from parsl_freetrain.training.checkpoint.part_writers import PartWriters
from parsl_freetrain.training.checkpoint.state import State
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore
from parsl_freetrain.training.checkpoint.transport_memory import Snapshots
from parsl_freetrain.training.comm.exchange_watch import exchanges
from parsl_freetrain.training.loop.handover import StateSender
from parsl_freetrain.training.loop.save_timing import Background, SaveTiming
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.fragment_order import FragmentOrder

log = logging.getLogger(__name__)

_FEWEST_S = 1.0
_TIMES = 10  # a part that takes this many times as long as any before is not waited for
_LONGEST_STEP_S = 10.0  # a longer one is not waited for
LARGE_BYTES = 50_000_000
"""From this size on, a state left in memory is committed by the next fragment, if that is ready."""
Collect = Callable[[], State | None]  # the state, or this rank's part; None where no rank writes


class Checkpointer:
    """Saves checkpoints: a thread writes a copy, and errors are raised at the next step. ``sender``
    leaves the state in memory at the stop; ``writers`` write together (None: rank 0).
    """

    def __init__(
        self,
        store: PosixCheckpointStore,
        order: FragmentOrder,
        channel: Channel[msg.ToRank],
        last: Checkpoint | None,
        sender: StateSender | None = None,
        writers: PartWriters | None = None,
    ) -> None:
        self._store, self._order, self._channel = store, order, channel
        self._sender = sender
        self.timing = SaveTiming(order)
        self._writers = writers or PartWriters(None, 0, 1, Path(order.store), self.patience_s)
        self._background = Background('checkpoint')
        self.proves = False  # whether somebody sets ``proof`` when the next step is known
        self.proof = threading.Event()
        self._snapshots, self._room = Snapshots(), Background('memory for checkpoints')
        self._frozen = Frozen(store, order.fragment, self._writers.rank)
        self._save = 0
        self._on_disk: State | None = None  # the copy that was written last
        self._begun_with_uncommitted = self._only_in_memory = False
        self.last = last  # committed one

    def patience_s(self) -> float:
        """Seconds that rank 0 waits for the other ranks' parts after its own is written."""
        return _TIMES * max(self.timing.longest_s, _FEWEST_S)

    def outcome(
        self,
        how: msg.RankEnd,
        error: msg.RankError | None,
        samples: int,
        metrics: Mapping[str, float],
        left: msg.StateLeft | None = None,
    ) -> msg.Outcome:
        """The last message, after a checkpoint in writing. ``left``: after the loss of a rank."""
        last = self.settled(
            None if how in ('finished', 'stopped') else self._writers.peer_lost(self.patience_s())
        )
        if self._sender is not None and how == 'peer-lost' and left is None:
            self._sender.keep(self._on_disk)
        if self._sender is not None and how == 'stopped':
            left = self._sender.left
        told = None if self._only_in_memory else last
        return msg.Outcome(
            how,
            samples,
            path=told.path if told is not None else None,
            handed_in=told.handed_in if told is not None else '',
            metrics=dict(metrics),
            error=error,
            idle_s=time.monotonic() - at if (at := self.timing.stepped_at) else None,
            step_s=self.timing.step_s,
            checkpoint_s=self.timing.measured_s,
            left=left,
        )

    def must_stop(self, steps_ahead: int) -> bool:
        """Whether there may be too little time to save after ``steps_ahead`` more batches."""
        return self.timing.must_stop(steps_ahead, writing=self._background.busy)

    def wants_to_save(self, *, near_end: bool = False, steps_left: float = math.inf) -> bool:
        """Whether one is due and none is being written; FreeTrainError if the last one failed."""
        if self._background.busy:
            return False
        self.stopped()
        return self.timing.due(near_end=near_end, steps_left=steps_left)

    def save_soon(self) -> None:
        self.timing.want_soon()
        self._begun_with_uncommitted = True

    def make_room(self, state: State, untrained: Collection[str] = ()) -> None:
        """In a thread, write what is ``untrained``, and make memory for copies of a large state."""

        def begin() -> None:
            self._frozen.begin(state, untrained)
            if self.timing.size >= LARGE_BYTES:
                self._snapshots.reserve(self._frozen.without(state))

        self._room.start(begin)

    def save_beside(self, collect: Collect, samples: int, metrics: Mapping[str, float]) -> None:
        """Copy the state, and commit it while training continues, when the digest of the next step
        is there, which proves later that training goes on as before; otherwise as :meth:`save_now`.
        """
        began = time.monotonic()
        state, numbers = self._collected(collect), dict(metrics)
        if state is not None:
            copied, save = self._copied(state), self._save
            pause_s = time.monotonic() - began
            self.proof.clear()

            def commit() -> None:
                since = time.monotonic()
                _ = copied.image and copied.image.content  # a device copies, and does nothing else
                self.timing.pause_s = pause_s + time.monotonic() - since
                if self.proves:
                    self.proof.wait(min(1 + 2 * self.timing.expected_step_s, _LONGEST_STEP_S))
                self._commit(copied, save, samples, numbers, lambda: pause_s)

            self._background.start(commit)
        self.timing.count_from_here()

    def save_now(self, collect: Collect, samples: int, metrics: Mapping[str, float]) -> None:
        """Commit a checkpoint, report it, delete old ones. Raises Fenced or FreeTrainError."""
        began = time.monotonic()
        state = self._collected(collect)
        if state is not None:
            # Several threads write a copy, and none of them waits for a device.
            state = self._copied(state)
            self._commit(state, self._save, samples, metrics, partial(_since, began))
        self.timing.count_from_here()

    def save_and_stop(
        self, collect: Collect, samples: int, metrics: Mapping[str, float], *, wanted: bool = False
    ) -> None:
        """Leave the state in memory, and begin to commit it as the fragment's last checkpoint
        (:meth:`stopped` waits). If the next fragment is ready, committing a large state is left to
        it, as deleting is, unless the user wants this one (``wanted``), or what this fragment began
        with is not committed: a kill before that falls back to the previous checkpoint.
        """
        began, sender, numbers = time.monotonic(), self._sender, dict(metrics)
        if sender is not None:
            sender.agree()
        state, by_next = self._collected(collect), False
        if state is not None:
            state = self._copied(state)
            by_next = (
                sender is not None
                and self._writers.alone
                and self.timing.size >= LARGE_BYTES
                and not (wanted or self._begun_with_uncommitted)
                and self._order.spec.checkpoints.retention.every is None
                and sender.inbox.followed()
            )

        def commit() -> None:
            if state is not None:
                pause_s, save = partial(_since, began), self._save
                write = partial(self._commit, state, save, samples, numbers, pause_s, tidy=False)
                self._background.start(write)

        if sender is not None and state is not None and state.image is not None:
            _ = state.image.blocks  # known before both ways need them
        if not by_next:
            commit()
        if sender is not None:
            sender.leave(state, samples, uncommitted=by_next)
        if by_next:
            self._only_in_memory = sender is not None and sender.left is not None
            if not self._only_in_memory:
                commit()

    def stopped(self, limit_s: float | None = None) -> None:
        """Wait for the checkpoint in writing; it does not wait for a step of who waits for it."""
        self.proof.set()
        self._background.wait(limit_s)

    def settled(self, limit_s: float | None = None) -> Checkpoint | None:
        """The last checkpoint, or the one before if one in writing fails or takes ``limit_s``."""
        try:
            self.stopped(limit_s)
        except FreeTrainError:
            log.exception('The last checkpoint was not written')
        return self.last

    def _copied(self, state: State) -> State:
        self._on_disk = None
        with suppress(RuntimeError, MemoryError):  # then it is tried once more
            self._room.wait()
        return self._snapshots.take(self._frozen.without(state))

    def _collected(self, collect: Collect) -> State | None:
        self.stopped()
        with exchanges.not_followed():
            self._save = self._writers.begin()
            try:
                return collect()
            except BaseException as error:
                self._writers.refuse(self._save, error)
                raise

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
            if writers.rank > 0:
                writers.follow(save, state)
                self._on_disk = state
                self.timing.wrote(time.monotonic() - began)
                return  # rank 0 commits and tells
            self._channel.send(msg.SavingCheckpoint())
            self.last = self._store.save(
                lambda folder: writers.lead(save, folder, state),
                samples=samples,
                fragment=self._order.fragment,
                metrics=metrics,
                hand_in=partial(hand_in, self._order, state, metrics),
            )
        except BaseException as error:
            writers.refuse(save, error)
            if isinstance(error, OSError):
                raise FreeTrainError(
                    f'The checkpoint of trainer {self._order.trainer!r} at {samples} samples '
                    f'cannot be written to {self._order.store} ({error.strerror or error}); the '
                    'one before is still there.'
                ) from error
            raise
        seconds = time.monotonic() - began
        self._on_disk, self._begun_with_uncommitted = state, False
        self.timing.wrote(seconds)
        assert state.structure is not None
        position = state.structure['rest']['position']
        self.last = replace(
            self.last,
            at=time.time(),
            seconds=seconds,
            pause_s=pause_s(),
            resumes=position['resumes'],
            verified=position['verified'],
        )
        self._channel.send(CheckpointSaved(self.last.at, self.last))
        if tidy:
            self._tidy(position['batch_size'])
            self.timing.wrote(seconds, time.monotonic() - began - seconds)

    def _tidy(self, batch_size: int) -> None:
        spec, diloco = self._order.spec, self._order.spec.diloco
        rounds, last, forgotten = 0, 2, None
        if diloco and (diloco.overlap or diloco.transport):
            rounds = diloco.steps * batch_size
        if diloco and diloco.transport:  # another site may be a round behind this one
            last, forgotten = 2 + diloco.overlap, partial(forget, diloco.transport)
        try:
            self._store.prune(spec.checkpoints.retention, rounds, last, forgotten)
        except OSError:
            log.warning(
                'Old checkpoints in %s could not be removed', self._order.store, exc_info=True
            )


def _since(began: float) -> float:
    return time.monotonic() - began
