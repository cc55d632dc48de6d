"""The training loop of a fragment: training, checkpoints and rollbacks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import tee
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.slot_speed import wait_as_slow
from parsl_freetrain.training.checkpoint.source import divided, held
from parsl_freetrain.training.checkpoint.state import Position, State, collect, content_of
from parsl_freetrain.training.comm.consensus import (
    FINISH,
    GO_ON,
    REPORT,
    SAVE,
    SPOILT,
    STOP,
    Agreement,
)
from parsl_freetrain.training.data.loader import MicroBatch, seed_alike, seed_everything, to_device
from parsl_freetrain.training.loop.last_step import LastStep, Surroundings, versions
from parsl_freetrain.training.loop.rank_parts import BatchSource, LoopState, Model, RankParts
from parsl_freetrain.training.loop.replicas import Replicas
from parsl_freetrain.training.loop.rollback import Rollback
from parsl_freetrain.training.loop.update_guard import UpdateGuard
from parsl_freetrain.training.spec.messages import Progress, Started, StateLeft
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.spec.on_nan import ROLLBACK, NonFinitePolicy
from parsl_freetrain.training.steps.determinism import demand_determinism
from parsl_freetrain.training.steps.fsdp_modules import put_parts_back

PROGRESS_EVERY_S = 0.5
END_OF_EPOCH, NEXT_EPOCH = object(), object()
"""In place of micro-batches, where the function has a loop over ``ctx.epochs()``: when an epoch has
been trained, and when its end is done.
"""
BUSY_EVERY_S = 10.0  # during an evaluation, which makes no progress


class FragmentEnd(BaseException):
    """Ends the user's function when the fragment stops before the total. The state is already
    saved.
    """


class EvaluationStopped(BaseException):
    """Ends an evaluation, since the fragment has to stop."""


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
        guard: UpdateGuard,
    ) -> None:
        self._order, self._device, self._peers = parts.order, parts.device, parts.peers
        self._channel, self._inbox = parts.channel, parts.inbox
        self._checkpointer = parts.checkpointer
        self._rank = parts.place.rank
        self._is_main = self._rank == 0
        self._prepared, self._division = model.prepared, model.division
        self._steps, self._watch = model.steps, model.watch
        self._hooks, self._guard = model.hooks, guard
        self._state, self._position, self._policy = state, position, policy
        self._last = LastStep(parts, model, state)
        self._rollback = Rollback(parts, model, state, policy)
        self._replicas = Replicas(parts, model)
        self._data: BatchSource | None = None
        self._epochs_ended = 0
        self._reported_at = 0.0
        self._rate = 0.0
        self._near_end = self._at_end = False

    def run(self, data: BatchSource) -> Iterator[Any]:
        """Yield micro-batches up to the end of the loop."""
        state, self._data = self._state, data
        if self._policy.policy == ROLLBACK and not state.samples:
            self._save(self._checkpointer.save_now)  # the checkpoint that a rollback would need
        began_with = state.samples
        if state.wants_checkpoint:  # since the end of the loop before
            self._save(self._checkpointer.save_beside)
        if state.epoch_due:
            state.epoch = data.epochs_before(state.samples) - 1
            self._at_end = state.samples == data.end
            yield from self._end_epoch()
            if state.wants_checkpoint:
                self._save(self._checkpointer.save_beside)
        while not state.finished_early:
            yield from self._until_end(data)
            if (state.finished_early or state.samples == data.end) and not self._rollback.due():
                break
            state.finished_early, state.finishing = False, ''
            self._last.forget()
            self._rollback.go_back()
        self._last.forget()  # the code behind the loop needs its variables
        # A stream's own workers run for as long as somebody holds it.
        self._data, self._epochs_ended = None, data.epochs_before(state.samples)
        if state.samples > began_with and not self._steps.stepped:
            raise BadInput(
                'ctx.loop ended without a single optimizer.step(), so nothing was trained: call '
                'loss.backward() and optimizer.step() in it, with the optimizer that ctx.prepare '
                'returned.'
            )
        if state.finished_early:
            why = state.finishing or 'another rank called ctx.finish_early'
            print(f'Finished early at {state.samples} samples: {why}')
        state.complete = True

    def _until_end(self, data: BatchSource) -> Iterator[Any]:
        """Yield micro-batches up to the end, or until training must go back."""
        state, mode = self._state, self._order.spec.mode
        by_epochs = self._hooks.by_epochs
        self._last.end_batch()
        seed, began_with, began_at = mode.seed, state.samples, time.monotonic()
        reproducible = isinstance(mode, Reproducible)
        self._draw_for_itself()
        ahead, here = tee(
            (batch, self._steps.micro_batches(batch)) for batch in data.batches(state.samples)
        )
        # Ranks that train the same samples must also draw the same random numbers for them.
        drawn = seed if reproducible or self._division.grouped else None
        to_load = (micro_batch for _, micro_batches in ahead for micro_batch in micro_batches)
        loaded = iter(data.loader(to_load, drawn, self._device))
        for batch, micro_batches in here:
            batch_began_at = time.monotonic()
            state.reached = batch.samples_before + len(batch.indices)
            state.epoch = batch.epoch
            guarded = self._policy.looks_at_every_step(state.samples)
            self._last.begin_batch()
            self._steps.begin(batch, guarded)
            self._guard.begin_batch()
            if state.samples == began_with:
                self._channel.send(
                    Started(self._rank, state.samples, time.time(), keeps=self._last.possible)
                )
            for micro_batch in micro_batches:
                micro_batch_began_at = time.monotonic()
                batch_data = to_device(next(loaded), self._device)
                self._steps.begin_micro_batch(micro_batch)
                if isinstance(mode, Reproducible):
                    seed_everything(micro_batch.seed(seed, 'model'))
                    demand_determinism(warn_only=mode.warn_only)
                state.reports.begin_micro_batch(state.reached)
                self._guard.begin_micro_batch()
                yield batch_data
                self._guard.end_micro_batch()
                state.reports.end_micro_batch(micro_batch.weight)
                self._steps.end_micro_batch()
                wait_as_slow(time.monotonic() - micro_batch_began_at)
            # The next batch, or with a delay one of the next, is the last one.
            soon = state.reached + (1 + self._steps.delay) * data.order.batch_size
            self._near_end = (state.total_samples is not None and soon >= state.total_samples) or (
                by_epochs and data.epochs_before(soon) > batch.epoch
            )
            decision = self._steps.end(self._wish, self._checkpointer.timing.time_left)
            if self._steps.kept_back:
                self._policy.kept_back(state.samples, state.reached, self._steps.culprit())
                state.count('skipped_steps')
            elif guarded or reproducible:
                self._policy.went_well()
            state.samples = state.reached
            if not self._steps.kept_back:
                if reproducible and self._hooks.after_step:
                    seed_alike(state.samples, seed, 'after step')
                self._hooks.run(self._hooks.after_step)
            now = time.monotonic()
            self._checkpointer.timing.step_took(now - batch_began_at)
            self._rate = (state.samples - began_with) / (now - began_at)
            at_end = self._at_end = state.samples == data.end
            state.epoch_due = self._hooks.at_epochs and data.ends_epoch(state.samples)
            if by_epochs:  # a part of an epoch at the end is one, too
                state.epoch_due |= at_end or decision == FINISH
            # The code behind the user's loop needs its variables.
            needed = at_end or (by_epochs and state.epoch_due)
            self._last.end_batch(of_loop=needed or decision == FINISH)
            if decision == SPOILT or (
                (at_end or state.epoch_due or decision >= SAVE) and self._rollback.due()
            ):
                return
            if at_end or state.epoch_due or decision >= REPORT:
                state.reports.gather(self._peers)
                self.report_progress(wait=at_end)
            if decision == STOP and not needed:
                self.stop()
            ended = state.epoch_due
            if ended:
                yield from self._end_epoch()
            if decision == FINISH:
                state.finished_early = True
            if at_end or state.finished_early:
                return
            if ended and by_epochs and decision == STOP:
                self.stop()
            if decision == SAVE or state.wants_checkpoint:
                self._save(self._checkpointer.save_beside)
            if ended and by_epochs:
                self._last.end_batch()
                yield NEXT_EPOCH

    def stop(self) -> None:
        """End the fragment here, with a checkpoint. All ranks call this together.

        Raises
        ------
        FragmentEnd
            Always.
        """
        save = self._checkpointer.save_and_stop
        self._save(partial(save, wanted=self._state.wants_checkpoint))
        self._state.stopped = True
        raise FragmentEnd

    def save_last(self) -> None:
        """Commit the last checkpoint, after the function has returned."""
        self._state.finished = True
        self._save(self._checkpointer.save_now)
        self.report_progress(wait=True)

    def _stop_unsaved(self) -> None:
        """End the fragment in the last batch; the next one goes on from the last checkpoint."""
        last = self._checkpointer.settled()
        self._state.samples = last.samples if last is not None else 0
        self._state.stopped = True
        raise FragmentEnd

    def _save(self, save: Callable[[Any, int, Mapping[str, float]], None]) -> None:
        state = self._state
        best = {} if state.best is None else {'best': state.best}
        if state.wants_checkpoint:
            self._last.needs = state.samples
        self._replicas.check()
        save(self.to_save, state.samples, {**state.metrics, **best})
        state.best, state.wants_checkpoint = None, False

    def _draw_for_itself(self) -> None:
        """In throughput and scaled mode, from here on each rank draws random numbers of its own."""
        mode = self._order.spec.mode
        if not isinstance(mode, Reproducible):
            micro_batch = MicroBatch((), self._state.samples, self._division.data_rank, 0.0)
            seed_everything(micro_batch.seed(mode.seed, 'fragment'))

    def _end_epoch(self) -> Iterator[Any]:
        """Do what is to be done at the end of an epoch."""
        state, mode, hooks = self._state, self._order.spec.mode, self._hooks
        state.user_text()  # raises BadInput if it cannot be saved
        before = copy.deepcopy(state.user)
        around = Surroundings.of(self._prepared, averages=True)
        changes = versions(self._prepared.models)
        # Also where the ranks draw different numbers in the loop: what is decided or changed here
        # must be the same on all of them.
        seed_alike(state.samples, mode.seed, 'epoch')
        state.at_epoch_end = True
        try:
            hooks.run(hooks.each_epoch)
            if hooks.by_epochs:
                hooks.running = True
                yield END_OF_EPOCH
            hooks.run(hooks.after_epoch)
        except EvaluationStopped:
            # The next fragment does it again, from the beginning.
            state.user.clear()
            state.user.update(before)
            around.put_back(self._prepared)
            unchanged = changes == versions(self._prepared.models)
            if unchanged and not (self._at_end or hooks.by_epochs):
                self.stop()
            self._stop_unsaved()
        finally:
            state.at_epoch_end = hooks.running = False
        self._draw_for_itself()
        state.epoch_due = False
        self.report_progress(wait=False)
        finishing, checkpoint = self._peers.all_reduce_max(
            (bool(state.finishing), state.wants_checkpoint)
        )()
        state.finished_early, state.wants_checkpoint = bool(finishing), bool(checkpoint)

    def _wish(self) -> int:
        if self._rollback.spoilt_meanwhile():
            return SPOILT
        if self._state.finishing:
            return FINISH
        if self._inbox.stop_requested():
            return STOP
        if not self._is_main:
            return GO_ON
        if self._checkpointer.must_stop(1 + self._steps.delay):
            return STOP
        if self._checkpointer.wants_to_save(near_end=self._near_end):
            return SAVE
        due = time.monotonic() - self._reported_at >= PROGRESS_EVERY_S
        return REPORT if due else GO_ON

    def report_progress(self, *, wait: bool) -> None:
        """Tell the node agent how far the training is. Unless ``wait``, training does not wait for
        the node agent, which may be busy.
        """
        self._reported_at = time.monotonic()
        if self._is_main:
            state = self._state
            self._channel.send(
                Progress(state.samples, state.metrics, self._rate, time.time()), wait=wait
            )

    def may_stop(self) -> Callable[[], None]:
        """For an evaluation: to be called after each of its batches, equally often on all ranks.
        It raises :class:`EvaluationStopped` when the fragment has to stop.
        """
        agreement = Agreement(self._peers)

        def wish() -> int:
            stop = self._inbox.stop_requested() or (
                self._is_main and self._checkpointer.must_stop(1)
            )
            return STOP if stop else GO_ON

        def look() -> None:
            if time.monotonic() - self._reported_at >= BUSY_EVERY_S:
                self.report_progress(wait=False)
            if agreement.after_step(wish, self._checkpointer.timing.time_left) == STOP:
                raise EvaluationStopped

        return look

    def to_save(self) -> State | None:
        """The state of all ranks, on the rank that writes it; None on the others. All ranks that
        hold a part of the state must call this.
        """
        if not self._division.saves:
            return None
        if self._watch.spoilt():
            raise BadInput(self._policy.sentence(self._rollback.fine_at, self._state.samples))
        if self._is_main:
            self._state.user_text()  # raises BadInput if it cannot be saved
        content = self._division.join(content_of(self._prepared, named=self._division.stated))
        if not self._is_main and not self._division.sharded:
            return None
        state = self._state_of(content)
        return divided(state, self._division.mesh, self._rank) if self._division.sharded else state

    def leave(self) -> StateLeft | None:
        """After the loss of another rank: leave the state at the end of the last global batch in
        memory for the next fragment; None if this rank does not.
        """

        def state() -> State:
            put_parts_back(self._prepared.models)
            found = self._state_of(content_of(self._prepared, named=self._division.stated))
            if not self._division.sharded:
                return found
            return held(found if self._last.knows_all else replace(found, structure=None))

        return self._last.leave(state)

    def _state_of(self, content: Mapping[str, Any]) -> State:
        state = self._state
        position = replace(
            self._position,
            samples=state.samples,
            checkpoint_s=self._checkpointer.timing.longest_s,
            user=state.user if self._is_main else {},
            epoch=self._data.epochs_before(state.samples) if self._data else self._epochs_ended,
            epoch_due=state.epoch_due,
            finishing=state.finishing,
            finished=state.finished,
            result=state.result,
        )
        return collect(content, position)
