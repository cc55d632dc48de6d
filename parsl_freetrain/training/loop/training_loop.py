"""The training loop of a fragment: training, checkpoints and rollbacks."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import FragmentStarted
from parsl_freetrain.host.slot import wait_as_slow
from parsl_freetrain.training.checkpoint.state import Position
from parsl_freetrain.training.comm.peers import Agreed, PeerLost, on_any_rank
from parsl_freetrain.training.data.loader import MicroBatch, seed_alike, seed_everything, to_device
from parsl_freetrain.training.data.sample_order import GlobalBatch
from parsl_freetrain.training.loop.body import NEVER_STEPPED, TRAINED_WITHOUT_STEP, Body
from parsl_freetrain.training.loop.last_step import LastStep, around_models, versions
from parsl_freetrain.training.loop.loop_data import Batch, BatchSource
from parsl_freetrain.training.loop.loop_saver import LoopSaver
from parsl_freetrain.training.loop.loop_state import FragmentEnd, LoopState, Phase
from parsl_freetrain.training.loop.loss import Loss, with_shares
from parsl_freetrain.training.loop.numbers import Numbers
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.loop.update_guard import UpdateGuard
from parsl_freetrain.training.loop.verification import Verification
from parsl_freetrain.training.loop.wishes import BUSY_EVERY_S, EvaluationStopped, Rollback, Wishes
from parsl_freetrain.training.spec.mode import ROLLBACK, NonFinitePolicy, Reproducible
from parsl_freetrain.training.steps import backward
from parsl_freetrain.training.steps.determinism import demand_determinism
from parsl_freetrain.training.steps.reproducible import ReproducibleSteps

END_OF_EPOCH, NEXT_EPOCH = object(), object()
"""In place of micro-batches within ``ctx.epochs()``: an epoch is trained, and its end is done."""


class TrainingLoop:
    def __init__(
        self,
        parts: RankParts,
        model: Model,
        state: LoopState,
        position_at: Callable[[int], Position],
        guard: UpdateGuard,
        verification: Verification,
        body: Body,
        loss: Loss | None,
    ) -> None:
        order, self._mode = parts.order, parts.order.spec.mode
        self._key, self._replica = order.key, order.spec.replica
        self._seed = self._mode.seed + (self._replica << 32)  # of what a replica draws for itself
        self._reproducible = isinstance(self._mode, Reproducible)
        self._rank, self._device, self._peers = parts.place.rank, parts.device, parts.peers
        self._channel, self._checkpointer = parts.channel, parts.checkpointer
        self._prepared, self._division = model.prepared, model.division
        self._carried, self._modules, self._shards = model.carried, model.modules, order.spec.shards
        self._steps, self._hooks, self._guard = model.steps, model.hooks, guard
        self._state, self._verification = state, verification
        self._body, self._loss = body, loss
        self._policy = NonFinitePolicy(self._mode.on_nan, str(order))
        self._last = LastStep(parts, model, state)
        self._rollback = Rollback(parts, model, state, self._policy)
        self.saver = LoopSaver(
            parts, model, state, position_at, self._last, self._rollback, verification
        )
        self.wishes = Wishes(parts, model, state, self._rollback)
        self._began, self._warm = 0, False  # samples at the loop's begin; a step was taken
        self._paced = 0, 0.0  # samples and time where the rate is counted from
        self._guarded = self._at_end = False
        self._tables: Numbers | None = None  # of which each rank has entries

    def run(self, data: BatchSource) -> Iterator[Any]:
        state = self._state
        if self._policy.policy == ROLLBACK and state.samples == data.base:
            self.saver.save(self._checkpointer.save_now)  # which a rollback would need
        began_with = state.samples
        self.saver.save_wanted()  # since the end of the loop before
        if due := state.epoch_due:
            self._carried.go_on()  # before functions of the epoch's end change them
            state.reports.share(self._peers)
            state.epoch = data.epochs_before(state.samples) - 1
            self._at_end = state.samples == data.end
            yield from self._end_epoch()
            data.look()
            if not self._at_end:  # else with what the function returns, or before the next loop
                self.saver.save_wanted()
        if state.round_begins and state.samples < data.end:
            self.saver.make_room()
            self.saver.save(self._checkpointer.save_beside)
        if due and self._hooks.by_epochs and not self._at_end:
            self._last.end_batch()
            yield NEXT_EPOCH
        while not state.loop_over:
            yield from self._until_end(data)
            ended = state.phase is Phase.ENDED_EARLY or state.samples == data.end
            if ended and not self._rollback.due():
                break
            state.phase, state.finishing = Phase.TRAINING, ''
            self._last.forget()
            self._rollback.go_back()
        self._last.forget()  # the code behind the loop needs its variables
        if not self._hooks.by_epochs:
            self._carried.end_loop()
        if isinstance(self._steps, ReproducibleSteps):
            self._steps.numbers = None
        if state.samples > began_with and not self._steps.stepped:
            raise BadInput(NEVER_STEPPED)
        if self._reproducible:
            seed_alike(data.end, self._mode.seed, 'after a loop')
        if state.phase is Phase.ENDED_EARLY:
            why = state.finishing or 'another rank called ctx.finish_early'
            print(f'Finished early at {state.samples} samples: {why}')
        else:
            state.phase = Phase.LOOP_ENDED

    def _until_end(self, data: BatchSource) -> Iterator[Any]:
        state, by_epochs = self._state, self._hooks.by_epochs
        self._last.end_batch()
        self._began, self._paced = state.samples, (state.samples, time.monotonic())
        batches = self._batches(data)
        # In ctx.epochs each epoch's loop begins anew.
        begins = by_epochs and data.ends_epoch(state.samples)
        self._begin_loop(data, goes_on=state.samples > data.base and not begins)
        for batch, micro_batches, loaded in batches:
            began_at = time.monotonic()
            before = None if self._steps.stepped else versions(self._prepared)
            self._begin(batch)
            yield from self._train(micro_batches, loaded)
            changed = before is not None and before != versions(self._prepared)
            decision = self._take_step(batch, data, began_at)
            if changed and not self._steps.stepped:
                raise BadInput(TRAINED_WITHOUT_STEP)
            needed = self._end_batch(decision, data)
            yield from self._exchange(self._verification.conclude, batches)
            notable = self._at_end or state.epoch_due or state.round_ended
            settles = notable or decision >= Agreed.SAVE or state.wanted is not None
            if self._tables is not None and (settles or data.ends_epoch(state.samples)):
                together = partial(self._tables.put_together, self._peers)
                yield from self._exchange(together, batches)
            if settles:
                self._steps.settle()
            if decision is Agreed.SPOILT or (
                (notable or decision >= Agreed.SAVE) and self._rollback.due()
            ):
                return
            if notable or decision >= Agreed.REPORT:
                yield from self._exchange(partial(state.reports.gather, self._peers), batches)
                self.wishes.report(wait=self._at_end)
            if state.round_ended:
                yield from self._end_round()
            if decision is Agreed.STOP and not needed:
                yield from self._stop(None if state.epoch_due else batches)
            ended = state.epoch_due
            if ended:
                yield from self._end_epoch()
                data.look()
            if decision is Agreed.FINISH:
                state.phase = Phase.ENDED_EARLY
            if self._at_end or state.phase is Phase.ENDED_EARLY:
                return
            if ended and by_epochs and decision is Agreed.STOP:
                yield from self._stop(batches, self._next_epoch(data))
            if decision is Agreed.SAVE or state.wanted is not None:
                self.saver.save(self._checkpointer.save_beside)
            if ended and by_epochs:
                self._last.end_batch()
                yield from self._next_epoch(data)

    def _exchange(self, exchange: Callable[[], None], batches: Iterator[Batch]) -> Iterator[Any]:
        """Between steps. If a rank is lost, shards of the next one are computed, to verify by."""
        try:
            exchange()
        except PeerLost:
            going_on = self._verification.by_steps and self._last.goes_on
            if going_on and (following := next(batches, None)):
                self._begin(following[0])
                yield from self._train(*following[1:])
            raise

    def _next_epoch(self, data: BatchSource) -> Iterator[Any]:
        yield NEXT_EPOCH
        self._begin_loop(data, goes_on=False)

    def _begin_loop(self, data: BatchSource, *, goes_on: bool) -> None:
        self._carried.look_at_data(again=True)
        numbers = self._carried.begin_loop(self._state, goes_on=goes_on)
        self._body.look(numbers, self._carried.caches)
        if isinstance(self._steps, ReproducibleSteps):
            self._steps.numbers = numbers if self._shards > 1 else None
        elif numbers is not None and self._peers.world_size > 1:
            self._tables = numbers
            numbers.watch(range(data.order.batch_size))

    def _batches(self, data: BatchSource) -> Iterator[Batch]:
        self._draw_for_itself()
        # The same numbers for ranks with the same samples, and for workers after a cut.
        alike = self._reproducible or self._division.grouped or data.read.num_workers > 0
        how = self._hooks.at_epochs, self._seed if alike else None, self._device
        yield from data.loaded(self._state, self._steps.micro_batches, *how)

    def _begin(self, batch: GlobalBatch) -> None:
        state = self._state
        state.reached, state.epoch = batch.samples_after, batch.epoch
        self._guarded = self._policy.looks_at_every_step(state.samples)
        self._last.begin_batch()
        self._verification.begin(batch)
        if self._verification.measures:
            self._draw_for_itself()  # as the loader may have drawn some
        self._steps.begin(batch, self._guarded)
        self._guard.begin_batch()
        self._checkpointer.timing.begin()
        if state.samples == self._began:
            started = time.time(), *self._key, state.samples, self._rank
            self._channel.send(FragmentStarted(*started, keeps=self._last.possible))

    def _train(self, micro_batches: Sequence[MicroBatch], loaded: Iterator[Any]) -> Iterator[Any]:
        state, mode = self._state, self._mode
        began_at, own = time.monotonic(), backward.around.get('gradients')
        self._body.batches += 1
        try:
            for micro_batch, read in with_shares(self._loss, micro_batches, loaded, self._peers):
                data = to_device(read, self._device)
                self._steps.begin_micro_batch(micro_batch)
                own = backward.around.get('gradients')
                if self._reproducible or self._verification.measures:
                    seed_everything(micro_batch.seed(self._seed, 'model'))
                if isinstance(mode, Reproducible):
                    demand_determinism(warn_only=mode.warn_only)
                state.reports.begin_micro_batch(state.reached)
                self._body.begin(data, len(micro_batch.indices))
                yield data
                self._body.end(data, self._steps.stepped)
                self._guard.end_micro_batch()
                state.reports.end_micro_batch(micro_batch.weight, len(micro_batch.indices))
                self._steps.end_micro_batch()
                wait_as_slow(time.monotonic() - began_at)
                began_at = time.monotonic()
        finally:  # the function may leave the loop in the middle
            backward.forget(own)
        self._guard.end_body()

    def _take_step(self, batch: GlobalBatch, data: BatchSource, began_at: float) -> Agreed:
        """Finish the step of a global batch; returns what all ranks do next."""
        state, steps, hooks = self._state, self._steps, self._hooks
        # The next batch, or with a delay one of the next, is the last one.
        batch_size = data.order.batch_size
        soon = state.reached + (1 + steps.delay) * batch_size
        total = math.inf if state.total_samples is None else state.total_samples
        self.wishes.steps_left = (total - state.reached) / batch_size
        self.wishes.near_end = soon >= total or (
            hooks.by_epochs and data.epochs_before(soon) > batch.epoch
        )
        decision = Agreed(steps.end(self.wishes.after_step, self._checkpointer.timing.time_left))
        self._verification.end()
        if steps.kept_back:
            self._policy.kept_back(state.samples, state.reached, steps.culprit())
            state.count('skipped_steps')
        elif self._guarded or self._reproducible:
            self._policy.went_well()
        state.samples = state.reached
        if not steps.kept_back:
            if self._reproducible and hooks.at_step_end:
                seed_alike(state.samples, self._mode.seed, 'after step')
            hooks.run(hooks.at_step_end)
        now, (samples, since) = time.monotonic(), self._paced
        self._checkpointer.timing.step_took(now - began_at)
        self.wishes.rate = (state.samples - samples) / data.replicas / (now - since)
        if batch.samples_before == self._began:
            self.saver.make_room()
        if not self._warm:  # the first step is slower than the next ones, which come soon
            self._warm, self._paced = True, (state.samples, now)
            if now - since < BUSY_EVERY_S:
                self.wishes.rate = None
        return decision

    def _end_batch(self, decision: Agreed, data: BatchSource) -> bool:
        """Returns whether the code behind the user's loop needs its variables."""
        state, by_epochs = self._state, self._hooks.by_epochs
        self._at_end = state.samples == data.end
        state.epoch_due = self._hooks.at_epochs and data.ends_epoch(state.samples)
        if by_epochs:  # a part of an epoch at the end is one, too
            state.epoch_due |= self._at_end or decision is Agreed.FINISH
        state.round_ended = data.round_ended(state.samples)
        needed = self._at_end or (by_epochs and state.epoch_due)
        self._last.end_batch(of_loop=needed or decision is Agreed.FINISH or state.round_ended > 0)
        return needed

    def _end_epoch(self) -> Iterator[Any]:
        state, hooks = self._state, self._hooks
        self._carried.look_at_data(again=False)
        around = around_models(state, self._prepared, averages=True)
        before = self._marks()
        # Also where the ranks draw different numbers in the loop: what is decided or changed here
        # must be the same on all of them.
        seed_alike(state.samples, self._mode.seed, 'epoch')
        if state.reports.means.used:
            state.reports.means.gather(self._peers)
        state.phase = Phase.EPOCH_END
        try:
            hooks.run(hooks.each_epoch)
            if hooks.by_epochs:
                hooks.running = True
                yield END_OF_EPOCH
            hooks.run(hooks.after_epoch)
        except EvaluationStopped:
            # The next fragment does it again, from the beginning.
            here = not around.put_back(state, self._prepared) or before != self._marks()
            changed = on_any_rank(self._peers, here)  # rank 0 may write a log
            if not (changed or self._at_end or hooks.by_epochs):
                yield from self._stop()
            # It ends in the last batch; the next one goes on from the last checkpoint.
            last = self._checkpointer.settled()
            state.samples = last.samples if last is not None else 0
            state.phase = Phase.STOPPED
            raise FragmentEnd from None
        finally:
            if state.phase is Phase.EPOCH_END:
                state.phase = Phase.TRAINING
            hooks.running = False
        if self._carried.look_at_data(again=True) and hooks.by_epochs:
            self._carried.begin_epoch()
        self._draw_for_itself()
        state.epoch_due = False
        state.reports.means.end_epoch()
        self.wishes.report(wait=False)
        wishes = bool(state.finishing), state.wanted is not None
        finishing, checkpoint = self._peers.all_reduce_max(wishes)()
        if finishing:
            state.phase = Phase.ENDED_EARLY
        if checkpoint and state.wanted is None:
            state.wanted = {}

    def _marks(self) -> Any:
        return versions(self._prepared), self._carried.marks(), self._modules.changed_settings()

    def _draw_for_itself(self) -> None:
        """In throughput and scaled mode, from here on each rank draws random numbers of its own."""
        if not self._reproducible:
            micro_batch = MicroBatch((), self._state.samples, self._division.data_rank, 0.0)
            seed_everything(micro_batch.seed(self._seed, 'fragment'))

    def _stop(self, batches: Iterator[Batch] | None = None, *before: Any) -> Iterator[Any]:
        """End with a checkpoint, while the next step is computed if there is time."""
        state, checkpointer = self._state, self._checkpointer
        wanted = state.wanted is not None or state.round_ended > 0
        epoch_s = state.between_epochs_s if before else 0.0
        self.saver.save(partial(checkpointer.save_and_stop, wanted=wanted))
        state.phase = Phase.STOPPED  # whatever the function and the other ranks come to
        following = next(batches, None) if batches is not None else None
        if following is not None:
            late = not (self._verification.rehearsed or checkpointer.timing.writing_takes(epoch_s))
            if self._verification.looks_ahead and not on_any_rank(self._peers, late):
                yield from chain(*before)
                yield from self._look_ahead(*following)
            else:
                self._verification.begin(following[0])
                self._verification.conclude()
        self._verification.settle()
        try:
            checkpointer.stopped()
        except BaseException:
            state.phase = Phase.TRAINING
            raise
        raise FragmentEnd

    def _end_round(self) -> Iterator[Any]:
        """End the fragment with the piece. What is behind the loop is the first replica's."""
        try:
            yield from self._stop()
        finally:
            if self._at_end and self._replica and self._state.phase is Phase.STOPPED:
                self._state.phase = Phase.FINISHED

    def _look_ahead(
        self, batch: GlobalBatch, micro_batches: Sequence[MicroBatch], loaded: Iterator[Any]
    ) -> Iterator[Any]:
        """Compute a step for its digest. What it changes is lost: the state has been copied."""
        samples, metrics = self._state.samples, dict(self._state.metrics)
        try:
            self._begin(batch)
            yield from self._train(micro_batches, loaded)
            self._steps.end(lambda: Agreed.GO_ON, self._checkpointer.timing.time_left)
            self._verification.end()
            self._verification.conclude()
        except Exception as error:  # the state is saved
            print(f'The step after {samples} samples cannot be computed ahead: {error!r}')
        finally:
            self._state.reports.forget()
            self._state.metrics.clear()
            self._state.metrics.update(metrics)

    def save_last(self) -> None:
        self._state.phase = Phase.FINISHED
        self.saver.save(self._checkpointer.save_now)
        self.wishes.report(wait=True)
