"""The training loop of a fragment: training, checkpoints and rollbacks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import tee
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.sharded_state import Opened, divided
from parsl_freetrain.training.checkpoint.state import (
    Position,
    State,
    collect,
    content_of,
    read_state,
    restore,
)
from parsl_freetrain.training.comm.consensus import GO_ON, SAVE, SPOILT, STOP
from parsl_freetrain.training.data.loader import MicroBatch, make_loader, seed_everything, to_device
from parsl_freetrain.training.loop.hooks import run_all
from parsl_freetrain.training.loop.parts import BatchSource, LoopState, Model, RankParts
from parsl_freetrain.training.loop.turn_guard import TurnGuard
from parsl_freetrain.training.spec.messages import Progress, Started
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.spec.on_nan import ROLLBACK, NonFinitePolicy
from parsl_freetrain.training.steps.determinism import demand_determinism

PROGRESS_EVERY_S = 0.5


class FragmentEnd(BaseException):
    """Ends the user's function when the fragment stops before the total. The state is already
    saved.
    """


class TrainingLoop:
    """Trains one fragment.

    Parameters
    ----------
    parts, model
        What the rank trains with, and what it trains.
    state
        The progress of the training; the loop updates it.
    position
        Saved with each checkpoint, with samples, longest checkpoint and user's dict filled in.
    policy
        Decides what happens when numbers are not finite.
    guard
        Notices parameters that change where they must not.
    """

    def __init__(
        self,
        parts: RankParts,
        model: Model,
        state: LoopState,
        position: Position,
        policy: NonFinitePolicy,
        guard: TurnGuard,
    ) -> None:
        self._order, self._device, self._peers = parts.order, parts.device, parts.peers
        self._channel, self._inbox = parts.channel, parts.inbox
        self._checkpointer = parts.checkpointer
        self._rank = parts.place.rank
        self._is_main = self._rank == 0
        self._resumed = parts.saved is not None
        self._prepared, self._division = model.prepared, model.division
        self._steps, self._watch = model.steps, model.watch
        self._hooks, self._guard = model.hooks, guard
        self._state, self._position, self._policy = state, position, policy
        self._fine_at = state.samples
        self._went_back = 0
        self._reported_at = 0.0

    def run(self, data: BatchSource) -> Iterator[Any]:
        """Yield micro-batches up to the total, and save the last state."""
        if self._policy.policy == ROLLBACK and not self._resumed:
            self._checkpointer.save_now(
                self.to_save, self._state.samples, self._state.metrics
            )  # the checkpoint that a rollback would need
        began_with = self._state.samples
        while True:
            yield from self._until_total(data)
            if self._state.samples == self._state.total_samples and not self._must_go_back():
                break
            self._go_back()
        if self._state.samples > began_with:
            self._checkpointer.save_now(self.to_save, self._state.samples, self._state.metrics)
        self._state.complete = True

    def _until_total(self, data: BatchSource) -> Iterator[Any]:
        """Yield micro-batches up to the total, or until training must go back."""
        seed, began_with, began_at = (
            self._order.spec.mode.seed,
            self._state.samples,
            time.monotonic(),
        )
        mode = self._order.spec.mode
        reproducible = isinstance(mode, Reproducible)
        if not reproducible:
            seed_everything(
                MicroBatch((), self._state.samples, self._division.data_rank, 0.0).seed(
                    seed, 'fragment'
                )
            )
        ahead, here = tee(
            (batch, self._steps.turns(batch)) for batch in data.order.batches(self._state.samples)
        )
        # Ranks that train the same samples must also draw the same random numbers for them.
        drawn = seed if reproducible or self._division.grouped else None
        micro_batches = iter(
            make_loader(
                data.dataset,
                (turn for _, turns in ahead for turn in turns),
                drawn,
                data.collate_fn,
                data.num_workers,
                pin_memory=self._device.type != 'cpu',  # for copies that do not wait
            )
        )
        for batch, turns in here:
            batch_began_at = time.monotonic()
            self._state.reached = batch.samples_before + len(batch.indices)
            self._state.epoch = batch.epoch
            self._state.last_of_epoch = self._state.reached % data.order.dataset_size == 0
            guarded = self._policy.looks_at_every_step(self._state.samples)
            self._steps.begin(batch, guarded)
            self._guard.begin_batch()
            if self._state.samples == began_with:
                self._channel.send(Started(self._rank, self._state.samples, time.time()))
            for turn in turns:
                batch_data = to_device(next(micro_batches), self._device)
                self._steps.begin_turn(turn)
                if isinstance(mode, Reproducible):
                    seed_everything(turn.seed(seed, 'model'))
                    demand_determinism(warn_only=mode.warn_only)
                self._guard.begin_turn()
                yield batch_data
                self._guard.end_turn()
                self._steps.end_turn()
            decision = self._steps.end(self._wish, self._checkpointer.time_left)
            if self._steps.kept_back:
                self._policy.kept_back(
                    self._state.samples, self._state.reached, self._steps.culprit()
                )
                self._count('skipped_steps')
            elif guarded or reproducible:
                self._policy.went_well()
            self._state.samples = self._state.reached
            if not self._steps.kept_back:
                run_all(self._hooks.after_step)
            now = time.monotonic()
            self._checkpointer.step_took(now - batch_began_at)
            self._report_progress((self._state.samples - began_with) / (now - began_at))
            if (
                self._state.samples == self._state.total_samples
                or decision == SPOILT
                or (decision != GO_ON and self._must_go_back())
            ):
                return
            if decision == SAVE:
                self._checkpointer.save_beside(
                    self.to_save, self._state.samples, self._state.metrics
                )
            elif decision == STOP:
                self._checkpointer.save_and_stop(
                    self.to_save, self._state.samples, self._state.metrics
                )
                self._state.stopped = True
                raise FragmentEnd

    def _must_go_back(self) -> bool:
        """Whether the state of any rank has numbers that are not finite. All ranks take part, so
        that all can name the rank at fault.
        """
        looks = self._policy.policy == ROLLBACK or not isinstance(
            self._order.spec.mode, Reproducible
        )  # reproducible mode checks every step
        return looks and bool(self._peers.largest((self._watch.spoilt(),))()[0])

    def _go_back(self) -> None:
        """Go back to the last checkpoint, on all ranks."""
        self._went_back += 1

        def what() -> str:
            last = self._checkpointer.settled()
            return json.dumps(
                [last.path if last is not None else '', self._state.metrics.get('rollbacks', 0)]
            )

        path, before = json.loads(self._peers.tell(f'back-{self._went_back}', what))
        self._policy.go_back(
            self._fine_at, self._state.samples, int(before), path, self._steps.culprit()
        )
        print(
            f'Going back from {self._state.samples} samples to checkpoint {path}: numbers were '
            'not finite'
        )
        saved = Opened(path).load(self._prepared) if self._division.sharded else read_state(path)
        restore(self._prepared, saved, parts=self._division.pipelined)
        self._state.user.clear()
        self._state.user.update(saved.position.user)
        self._state.samples = self._fine_at = self._state.reached = saved.position.samples
        self._state.metrics['rollbacks'] = before
        self._count('rollbacks')
        self._checkpointer.went_back()

    def _count(self, what: str) -> None:
        self._state.metrics[what] = self._state.metrics.get(what, 0.0) + 1

    def _wish(self) -> int:
        if not isinstance(self._order.spec.mode, Reproducible) and self._watch.due():
            if self._watch.spoilt():
                return SPOILT
            self._fine_at = self._state.samples
        if self._inbox.stop_requested():
            return STOP
        if not self._is_main:
            return GO_ON
        if self._checkpointer.must_stop(1 + self._steps.delay):
            return STOP
        return SAVE if self._checkpointer.wants_to_save() else GO_ON

    def _report_progress(self, rate: float) -> None:
        now = time.monotonic()
        if self._is_main and now - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = now
            # The node agent may be busy; training does not wait for it.
            self._channel.send(
                Progress(self._state.samples, self._state.metrics, rate, time.time()), wait=False
            )

    def to_save(self) -> State | None:
        """The state of all ranks, on the rank that writes it; None on the others. All ranks that
        hold a part of the state must call this.
        """
        if not self._division.saves:
            return None
        if self._watch.spoilt():
            raise BadInput(self._policy.sentence(self._fine_at, self._state.samples))
        extras = self._state.extras() if self._is_main else ''
        content = self._division.join(content_of(self._prepared, named=self._division.stated))
        if not self._is_main and not self._division.sharded:
            return None
        self._state.saved_extras = extras
        state = collect(
            content,
            Position(
                **{
                    **vars(self._position),
                    'samples': self._state.samples,
                    'checkpoint_s': self._checkpointer.longest_s,
                    'user': self._state.user if self._is_main else {},
                }
            ),
        )
        return divided(state, self._division.mesh, self._rank) if self._division.sharded else state
