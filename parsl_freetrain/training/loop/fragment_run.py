"""What is behind the context of a fragment: the models, the loops and the progress of one rank."""

import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch.utils.data import DataLoader

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.core.model.events import TotalKnown
from parsl_freetrain.core.model.shape import Shape
from parsl_freetrain.training.checkpoint import state as saved_state
from parsl_freetrain.training.checkpoint.local_shard import local
from parsl_freetrain.training.checkpoint.trainables import check_schedulers, sort_out
from parsl_freetrain.training.comm import world
from parsl_freetrain.training.data.loader import seed_alike
from parsl_freetrain.training.data.loader_settings import LoaderData, LoaderSettings
from parsl_freetrain.training.data.own_generators import own_generators
from parsl_freetrain.training.loop import averages, body, loop_state, rounds, update_guard
from parsl_freetrain.training.loop.epoch_loop import EpochLoop, PreparedLoader, data_of
from parsl_freetrain.training.loop.evaluation import Measure, evaluate
from parsl_freetrain.training.loop.last_step import around_models, put_back_changes
from parsl_freetrain.training.loop.loop_data import LoopCall, LoopData, LoopLengths, LoopSpan
from parsl_freetrain.training.loop.loss import Loss, check
from parsl_freetrain.training.loop.places import variables
from parsl_freetrain.training.loop.preparing import prepare_model
from parsl_freetrain.training.loop.rank_parts import LoopHooks, Model, RankParts
from parsl_freetrain.training.loop.rehearsed import RehearsedSteps
from parsl_freetrain.training.loop.training_loop import TrainingLoop
from parsl_freetrain.training.loop.verification import Verification
from parsl_freetrain.training.loop.wishes import EvaluationStopped
from parsl_freetrain.training.spec import messages as msg
from parsl_freetrain.training.spec.mode import Reproducible
from parsl_freetrain.training.steps.accumulation import refuse_accumulation_of_accelerate
from parsl_freetrain.training.steps.buffers import plain_buffers
from parsl_freetrain.training.steps.mesh import division_of


class FragmentRun:
    """One rank in one fragment: the context's methods, and its end. ``saved``: where to go on."""

    def __init__(self, parts: RankParts) -> None:
        self._unguard: Callable[[], None] = lambda: None
        self.parts, self.order, self.saved = parts, parts.order, parts.saved
        self.peers, self.checkpointer = parts.peers, parts.checkpointer
        self.is_main = parts.place.rank == 0
        self.division = division_of(parts.order, parts.place, parts.device)
        self.state = loop_state.LoopState.at_start(
            parts.saved, parts.checkpointer.last, parts.order.spec.total_samples
        )
        self.hooks = LoopHooks()
        self.model: Model | None = None
        self.loop: TrainingLoop | None = None
        self.lengths = LoopLengths(parts.order.spec)
        self._averages: list[averages.PreparedAverage] = []
        self._epochs: EpochLoop | None = None
        self._rehearsed = RehearsedSteps(self) if parts.order.rehearsed is not None else None
        self._look: Callable[[], None] = lambda: None  # at the dataset, at the begin of an epoch
        self._at_prepare: Any = None
        self._handed: tuple[Any, ...] = ()  # what is saved, and what stands for it

    def in_body(self) -> bool:
        return self.state.reports.in_micro_batch

    def finish_early(self, reason: str) -> None:
        rounds.refuse(self.order, 'ctx.finish_early', 'replicas end with the total')
        self.state.finishing = reason

    def user_state(self) -> loop_state.UserState:
        if not self.state.user.used and self.is_main:
            self.parts.channel.send(msg.StateUsed())
        self.state.user.used = True
        return self.state.user

    def prepare(
        self, things: tuple[Any, ...], clip_grad_norm: float | None, find_unused_parameters: bool
    ) -> Any:
        if self.model is not None:
            raise BadInput(
                'ctx.prepare was called twice: call it once, with all models, optimizers '
                'and schedulers.'
            )
        loaders = [thing for thing in things if isinstance(thing, DataLoader)]
        others = tuple(thing for thing in things if not isinstance(thing, DataLoader))
        self.saved = rounds.next_round(self.parts, self.state)
        if self.saved is not None and not (
            isinstance(self.saved, saved_state.Saved) or self.order.spec.sharded
        ):
            self.saved = self.saved.load(sort_out(others))  # a file of several is damaged
        self.parts = replace(self.parts, saved=self.saved)
        self.model = prepare_model(others, self, clip_grad_norm, find_unused_parameters)
        prepared, steps = self.model.prepared, self.model.steps
        if self.order.spec.diloco is not None and self.saved is None:
            begin = rounds.weights_of(self.order).begin  # a survivor may have to leave its digest
            self.state.round_from = self.peers.broadcast_object('round', lambda: begin(prepared))
        if self.division.alike and isinstance(self.order.spec.mode, Reproducible):
            world.refuse_in_body(self.in_body)
            if self.parts.place.world_size > 1:
                world.hide()
        if self.saved is not None:
            self._at_prepare = around_models(self.state, prepared, bits=True)
        self.verification = Verification(self.parts, self.model, self.state)
        steps.before_step.append(self.verification.gradients)
        steps.before_step.append(self._before_step)
        self._averages = averages.take_averages(
            self.model, self.peers, self.in_body, fresh=self.saved is None
        )
        self.checkpointer.timing.expect(
            3 * sum(local(t).nbytes for t in prepared.tensors() if t.layout is torch.strided),
            self.saved.position.checkpoint_s if self.saved is not None else 0.0,
        )
        stand_ins = {
            id(thing): stand_in
            for kind in ('optimizers', 'schedulers')
            for thing, stand_in in zip(getattr(prepared, kind), getattr(steps, kind), strict=True)
        }
        stand_ins.update((id(loader), PreparedLoader(loader, self._epoch_of)) for loader in loaders)
        answers = tuple(stand_ins.get(id(thing), thing) for thing in things)
        self._handed = *things, *answers
        return answers[0] if len(answers) == 1 else answers

    def _before_step(self) -> None:
        mode = self.order.spec.mode
        self.hooks.check_shared(self.model)
        if self.hooks.before_step and isinstance(mode, Reproducible):
            seed_alike(self.state.samples, mode.seed, 'before step')
        self.hooks.run(self.hooks.before_step)

    def _epoch_of(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._epochs is None:
            raise BadInput(
                'A DataLoader that was given to ctx.prepare was iterated over outside of '
                'ctx.epochs(): say "for epoch in ctx.epochs():" around it, or keep it out of '
                'ctx.prepare if it is not for the training.'
            )
        return self.begin_loop(loader, None, None, None, None, LoaderSettings())

    def begin_loop(
        self,
        dataset: Any,
        batch_size: int | None,
        micro_batch: int | None,
        epochs: float | None,
        samples: int | None,
        own: LoaderSettings,
        loss: Loss | None = None,
        accumulate: int = 1,
    ) -> Iterator[Any]:
        if self.model is None:
            raise BadInput(
                'ctx.loop was called before ctx.prepare: prepare models, optimizers and '
                'schedulers first.'
            )
        if self.loop is not None and not (self.state.loop_over or self._epochs):
            raise BadInput(self._left_early())
        if micro_batch is not None and micro_batch < 1:
            refuse('The micro_batch given to ctx.loop', micro_batch, '1 or more')
        if accumulate < 1:
            refuse('The accumulate given to ctx.loop', accumulate, '1 or more')
        refuse_accumulation_of_accelerate()
        self._look_around(dataset)
        check_schedulers(self.model.prepared)
        check(loss, plain=body.has_whole_models(self.order.spec, self.division, self.peers))
        data = data_of(dataset, batch_size, own, accumulate)
        if accumulate > 1 and not isinstance(self.order.spec.mode, Reproducible):
            diloco = self.order.spec.diloco
            parts = self.division.parts * (diloco.replicas if diloco is not None else 1)
            each = math.ceil(data.batch_size / accumulate / parts)
            micro_batch = min(each, micro_batch or each)
        call = LoopCall(data, micro_batch, epochs, samples, loss)
        if self._rehearsed is None:
            return self._loop(self.model, call)
        call = replace(call, data=self._rehearsed.data(data))
        return self._rehearsed.follow(self._loop(self.model, call), call.data.num_workers)

    def _loop(self, model: Model, call: LoopCall) -> Iterator[Any]:
        if self._epochs is not None and not self.state.loop_over:
            self._epochs.begin_loop(call)
            if self.loop is not None:
                self._look()
                return self._epochs.micro_batches(call)
        batches = self._batches(model, call)
        if self._epochs is None or batches is None:
            return iter(()) if batches is None else batches
        return self._epochs.micro_batches(call, batches)

    def _batches(self, model: Model, call: LoopCall) -> Iterator[Any] | None:
        """The batches of a loop; None: an earlier fragment has trained it, or training is over."""
        spec, data = self.order.spec, call.data
        there = self.saved.position if self.saved is not None else None
        begun = there is not None and there.loop == self.lengths.loops + 1
        epoch = there.epoch - there.epoch_due if begun and there is not None else 0
        how = spec.mode.seed, self.peers, max(epoch, 0), self.order.rehearsed
        source = LoopData(data, *how)
        span = self.lengths.next(there, self.state.samples, source.in_epoch, call)
        own_generators.find({'the functions': self.hooks.functions, **variables()})
        own_generators.find({'the data': data.dataset, 'sampler': data.sampler})
        self.state.reports.means.used |= body.asks_for_means(self.hooks, spec)
        over = self.state.phase is loop_state.Phase.ENDED_EARLY
        if over or (there and span.number != there.loop):
            model.carried.pass_over()
            if isinstance(spec.mode, Reproducible):  # as where the loop has been trained
                seed_alike(span.base + span.length, spec.mode.seed, 'after a loop')
            return None
        self._tell_total(span.total)
        self.verification.loop_begins()
        # What the function does at the beginning of an epoch counts; else it is repeated.
        of_epoch = (self.state.samples - span.base) % source.in_epoch == 0
        begins = self._epochs is not None and of_epoch and not (there and there.epoch_due)
        if begun and not begins:
            model.carried.put_back('loop')
            source = LoopData(data, *how)  # of the data as they were
        return self._begin(model, call, source, span, begins=begins)

    def _begin(
        self, model: Model, call: LoopCall, source: LoopData, span: LoopSpan, *, begins: bool
    ) -> Iterator[Any]:
        """Go on in a loop; ``begins``: with an epoch of it."""
        spec, saved = self.order.spec, self.saved
        if self.division.shape.spatial == Shape().spatial:  # else ranks have parts of samples
            source.check_same(saved)
        position = source.position(self.state.samples, span, spec.shards, saved)
        guard, anew = self._guard_of(model), self.state.samples == span.base
        if self.state.phase is loop_state.Phase.LOOP_ENDED:
            self.state.phase = loop_state.Phase.TRAINING
        model.structure.check()
        if saved is not None:
            if not begins:
                since = self._epochs.before if self._epochs is not None else self._at_prepare
                put_back_changes(since, self.state, model, saved, self.peers)
            self._go_on(model, saved, position)
        model.modules.begin(put_back=not begins)
        batches = source.batches(self.state.samples, span, spec)
        if self._epochs is not None:
            self._look = batches.look
        rounds.tell_round(self.parts, batches, span.total)
        model.steps.limit(call.micro_batch, batches.order.batch_size // batches.replicas)
        base, in_epoch, order_at = batches.base, batches.order.epoch_size, source.order_at

        # Not a method of the batches: a stream's own workers run for as long as it is held.
        def position_at(samples: int) -> saved_state.Position:
            epoch, order = (samples - base) // in_epoch, order_at(samples - base)
            return replace(position, samples=samples, epoch=epoch, order=order)

        seen = body.Body(spec, self.division, self.peers, anew, call)
        around = position_at, guard, self.verification, seen, call.loss
        self.loop = TrainingLoop(self.parts, model, self.state, *around)
        self._running = self.loop.run(batches)
        alone = anew and self._epochs is None and span.length == span.total
        return body.alone(self._running) if alone else self._running

    def _tell_total(self, total: int) -> None:
        self.state.total_samples = total
        if self.is_main and self.order.spec.total_epochs is not None:
            self.parts.channel.send(TotalKnown(time.time(), self.order.trainer, total))

    def _guard_of(self, model: Model) -> update_guard.UpdateGuard:
        names, spec = variables(self.hooks.functions), self.order.spec
        self._unguard()  # of the loop before
        self._unguard = update_guard.guard_steps(model.prepared, self.state, spec, self.hooks)
        return update_guard.UpdateGuard(
            model.prepared,
            names,
            reproducible=isinstance(spec.mode, Reproducible),
            divided=body.parts_of_batch(spec) > 1,
            averages=self._averages,
            kept=model.carried.tensors(),
        )

    def _go_on(
        self, model: Model, saved: saved_state.Source, position: saved_state.Position
    ) -> None:
        """Raises BadInput if something has changed since, FragmentEnd if it is the last one."""
        there = saved.position
        if isinstance(saved, saved_state.Saved):
            saved_state.check_averages(saved, model.prepared.averages)
        saved_state.check_position(position, saved)
        self.state.epoch_due = there.epoch_due
        # The models hold its tensors now.
        self.saved, self.parts = None, replace(self.parts, saved=None)
        if there.finished and there.total_samples == position.total_samples:
            self.state.phase, self.state.result = loop_state.Phase.FINISHED, there.result
            raise loop_state.FragmentEnd
        if self.state.round_begins:  # that is no cut
            self.state.resumes, self.state.verified = there.resumes, there.verified
        else:
            self.verification.goes_on(saved)

    def _look_around(self, *data: Any) -> None:
        if self.model is not None and self.division.whole:  # else ranks hold different parts
            known = *self._handed, *data
            self.model.carried.look(known, self.model.prepared, self.hooks.functions)

    def begin_epochs(self) -> EpochLoop:
        if self.model is None or self.loop is not None or self._epochs is not None:
            raise BadInput(
                'ctx.epochs must be called once, after ctx.prepare and around the only ctx.loop: '
                '"for epoch in ctx.epochs():".'
            )
        self._look_around()
        if self.saved is not None:
            put_back_changes(self._at_prepare, self.state, self.model, self.saved, self.peers)
        self.model.carried.look_at_data(again=False)  # the first epoch may begin with a change
        self._epochs = EpochLoop(self.order.spec, self.state, self.model)
        self.hooks.by_epochs = True
        return self._epochs

    def evaluate(
        self, model: torch.nn.Module, data: LoaderData, measure: Measure, gradients: bool
    ) -> dict[str, float]:
        if self.state.reports.in_micro_batch:
            raise BadInput(
                'ctx.evaluate was called in the body of ctx.loop: call it in a function that is '
                'given to ctx.each_epoch, or behind the loop.'
            )
        if self.division.pipelined:
            raise BadInput('ctx.evaluate cannot evaluate a model that is divided into stages.')
        mode = self.order.spec.mode
        if self.division.alike and not isinstance(mode, Reproducible):
            self.peers.broadcast(plain_buffers(model))  # rank 0's are saved
        data = data if self._rehearsed is None else self._rehearsed.shortened(data)
        stops = self.loop is not None and self.state.phase is loop_state.Phase.EPOCH_END
        try:
            after_batch = self.loop.wishes.in_evaluation() if self.loop and stops else lambda: None
            how = self.parts, self.division, after_batch, gradients
            return evaluate(model, data, measure, *how)
        except EvaluationStopped:
            if self._epochs is not None:
                self._epochs.stop()
            raise

    def add_average(self, model: torch.nn.Module, decay: float) -> torch.nn.Module:
        if self.model is None or self.loop is not None:
            raise BadInput('ctx.ema must be called after ctx.prepare and before ctx.loop.')
        self.model, average = averages.with_moving_average(self.model, model, decay, self.saved)
        return average

    def _left_early(self) -> str:
        return (
            f'The function left ctx.loop after {self.state.samples} of {self.state.total_samples} '
            'samples, or called it again: let it end by itself (a global batch may have several '
            'passes), and give it several DataLoaders at once, as in ctx.loop((first, other)); say '
            'ctx.finish_early(reason) where the training is good enough, or state a smaller total.'
        )

    def finish(self, returned: object) -> None:
        if self.state.phase is loop_state.Phase.FINISHED:
            return
        if self._epochs is not None:
            if self.loop is not None and self.state.samples != self.state.total_samples:
                rounds.refuse(self.order, 'Leaving ctx.epochs()', 'replicas end with the total')
            self._epochs.left()
        if self.loop is None:
            raise BadInput(
                'The function returned without ctx.loop: train in "for batch in '
                'ctx.loop(dataset, batch_size):".'
            )
        at_last = self.state.reached == self.state.total_samples and self._epochs is None
        if at_last and self.state.phase is loop_state.Phase.TRAINING:
            next(self._running, None)  # what counts steps itself has not asked for the end
        ended = self.state.samples == self.state.total_samples and self.state.loop_over
        if not (ended or self.state.phase is loop_state.Phase.ENDED_EARLY):
            raise BadInput(self._left_early())
        self.state.result = loop_state.plain_text(returned)
        self.loop.save_last()

    def outcome(self, how: msg.RankEnd, error: msg.RankError | None) -> msg.Outcome:
        left = self._leave() if how == 'peer-lost' else None
        samples, metrics = self.state.samples, self.state.metrics
        outcome = self.checkpointer.outcome(how, error, samples, metrics, left)
        return structs.replace(outcome, result=self.state.result) if how == 'finished' else outcome

    def _leave(self) -> msg.StateLeft | None:
        try:
            return self.loop.saver.leave() if self.loop is not None else None
        except Exception:  # the next fragment reads the checkpoint
            traceback.print_exc()
            return None
