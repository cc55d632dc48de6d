"""The context: the first argument of the user's function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.box import local
from parsl_freetrain.training.checkpoint.optimizer_state import move_to_parameters
from parsl_freetrain.training.checkpoint.state import (
    Position,
    Saved,
    check_averages,
    check_position,
    restore,
    restore_average,
)
from parsl_freetrain.training.checkpoint.trainables import check_schedulers, sort_out
from parsl_freetrain.training.data.loader import size_of
from parsl_freetrain.training.data.order import GlobalOrder, samples_in
from parsl_freetrain.training.loop.fragment_view import FragmentView
from parsl_freetrain.training.loop.hooks import Hooks, MovingAverage, run_all
from parsl_freetrain.training.loop.parts import BatchSource, Model, RankParts
from parsl_freetrain.training.loop.training_loop import TrainingLoop
from parsl_freetrain.training.loop.turn_guard import TurnGuard, modules_among
from parsl_freetrain.training.parallel.sharded import shard_model
from parsl_freetrain.training.spec.messages import Ending, Outcome, RankError, TotalSamples
from parsl_freetrain.training.spec.mode import Reproducible, Scaled
from parsl_freetrain.training.spec.on_nan import NonFinitePolicy
from parsl_freetrain.training.steps import lr
from parsl_freetrain.training.steps.modes import make_steps
from parsl_freetrain.training.steps.nonfinite import Watch
from parsl_freetrain.training.steps.sharded import check_sharded


class FragmentContext(FragmentView):
    """One fragment as one of its ranks sees it: the first argument of the user's function.

    Its attributes are those of :class:`~parsl_freetrain.training.loop.fragment_view.FragmentView`.
    """

    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        self._hooks = Hooks()
        self._model: Model | None = None
        self._loop: TrainingLoop | None = None

    def shard(
        self,
        model: torch.nn.Module,
        *,
        blocks: Sequence[type[torch.nn.Module]] = (),
        plan: Mapping[str, Any] | None = None,
        precision: Any = None,
        initialise: Callable[[torch.nn.Module], None] | None = None,
    ) -> torch.nn.Module:
        """Divide a model's parameters as :attr:`shape` says. Call it before the optimizer is made.

        Parameters and errors are those of
        :func:`parsl_freetrain.training.parallel.sharded.shard_model`.
        """
        if not self._division.sharded:
            raise BadInput(
                f'Trainer {self.trainer!r} calls ctx.shard, and none of its shapes divides the '
                'parameters: state them, such as sizes={1: Shape(), 2: Shape(shard=2)}.'
            )
        if self._saved is None:
            self._division.make_equal((t.data for t in model.state_dict().values()), self._peers)
        return shard_model(
            model,
            self.mesh,
            self.device,
            self._order.spec.mode.seed,
            blocks=blocks,
            plan=plan,
            precision=precision,
            initialise=initialise,
            saved=self._saved is not None,
        )

    def prepare(
        self,
        *things: Any,
        clip_grad_norm: float | None = None,
        find_unused_parameters: bool = False,
    ) -> Any:
        """Prepare models, optimizers and schedulers for :meth:`loop`, and load the last checkpoint
        into them.

        Parameters
        ----------
        *things
            All models with trained parameters, optimizers, learning rate schedulers and gradient
            scalers.
        clip_grad_norm
            Clip the gradient of the global batch to this norm.
        find_unused_parameters
            As in DistributedDataParallel; not available in reproducible mode.

        Returns
        -------
        The prepared objects, in the order of the arguments. Use these from now on.

        Raises
        ------
        BadInput
            If it is called twice, if an argument has another type, or if the checkpoint belongs to
            another model.
        """
        if self._model is not None:
            raise BadInput(
                'ctx.prepare was called twice: call it once, with all models, optimizers '
                'and schedulers.'
            )
        prepared = sort_out(things, named=self._division.stated)
        for model in prepared.models:
            model.to(self.device)
        for optimizer in prepared.optimizers:
            move_to_parameters(optimizer)
        if self._division.sharded:
            check_sharded(prepared, self._division, self._order.spec.mode)
        if self._saved is not None:
            saved = self._saved.load(prepared)
            restore(prepared, saved, parts=self._division.pipelined)
        else:
            self._division.make_equal((tensor.data for tensor in prepared.tensors()), self._peers)
        watch = Watch(prepared)
        if isinstance(mode := self._order.spec.mode, Scaled):
            lr.scale_steps(
                prepared.optimizers, lambda: mode.lr_factor(self.world_size, self.samples)
            )
        steps = make_steps(
            self._order,
            prepared,
            self._peers,
            self._division,
            clip_grad_norm,
            find_unused_parameters,
            self.device,
        )
        steps.before_step.append(lambda: run_all(self._hooks.before_step))
        self._model = Model(prepared, self._division, steps, watch, self._hooks)
        self._checkpointer.expect(
            3 * sum(local(tensor).nbytes for tensor in prepared.tensors()),
            self._saved.position.checkpoint_s if self._saved is not None else 0.0,
        )
        of = {
            id(thing): stand_in
            for kind in ('models', 'optimizers', 'schedulers')
            for thing, stand_in in zip(getattr(prepared, kind), getattr(steps, kind), strict=True)
        }
        of.update((id(scaler), scaler) for scaler in prepared.scalers)
        answers = tuple(of[id(thing)] for thing in things)
        return answers[0] if len(answers) == 1 else answers

    def before_step(self, function: Callable[[], object]) -> None:
        """Call a function once per global batch, on all ranks, when the gradient of the global
        batch is known and before it is clipped and used. There it may be read and changed.
        """
        self._hooks.before_step.append(function)

    def after_step(self, function: Callable[[], object]) -> None:
        """Call a function once per global batch, on all ranks, after the step of the optimizers.
        There, parameters may be read and changed, in the same way on all ranks. Steps that
        ``on_nan`` has skipped do not count.
        """
        self._hooks.after_step.append(function)

    def ema(self, model: torch.nn.Module, decay: float) -> torch.nn.Module:
        """The exponential moving average of a model's parameters over the steps, which is saved
        with every checkpoint.

        Parameters
        ----------
        model
            A model that :meth:`prepare` has returned.
        decay
            Weight of the old average in each step, 0 to 1, for instance 0.999.

        Returns
        -------
        torch.nn.Module
            A copy of the model with the averaged parameters and the model's own buffers, in
            evaluation mode. In :func:`~parsl_freetrain.load_weights` its names begin with 'ema.'.

        Raises
        ------
        BadInput
            If it is called before :meth:`prepare` or after :meth:`loop`, for a model that was not
            prepared, or with a pipeline.
        """
        if self._model is None or self._loop is not None:
            raise BadInput('ctx.ema must be called after ctx.prepare and before ctx.loop.')
        source = model.module if isinstance(model, DistributedDataParallel) else model
        if not any(source is one for one in self._model.prepared.models):
            raise BadInput('ctx.ema was given a model that was not given to ctx.prepare.')
        if self._division.pipelined or self._division.sharded:
            raise BadInput('ctx.ema cannot average a model that is divided among ranks.')
        average = MovingAverage(source, decay)
        averages = (*self._model.prepared.averages, average.model)
        if isinstance(self._saved, Saved):
            restore_average(average.model, self._saved, len(averages) - 1)
        self._model = replace(
            self._model, prepared=replace(self._model.prepared, averages=averages)
        )
        self._hooks.after_step.insert(len(averages) - 1, average.update)
        return average.model

    def loop(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> Iterator[Any]:
        """Batches from the current position to the total. Replaces the loop over epochs and the
        DataLoader.

        When the fragment has to stop, the loop ends the function by an exception that is not an
        ``Exception``. Code after the loop runs only when the total has been trained and saved.

        Parameters
        ----------
        dataset
            A map-style dataset: it has a length and an index.
        batch_size
            Number of samples in a global batch, over all ranks: what one optimizer step sees. In
            scaled mode, the number for the reference number of ranks.
        shuffle
            Whether each epoch has its own random order.
        collate_fn, num_workers
            As in DataLoader.

        Raises
        ------
        BadInput
            If :meth:`prepare` was not called, the loop is called twice, or the data have changed
            since the last checkpoint.
        """
        if self._model is None:
            raise BadInput(
                'ctx.loop was called before ctx.prepare: prepare models, optimizers and '
                'schedulers first.'
            )
        if self._loop is not None:
            raise BadInput(
                'ctx.loop was called twice: one loop trains up to the total; for phases, '
                'look at ctx.samples or ctx.epoch '
                'in it.'
            )
        check_schedulers(self._model.prepared)
        if isinstance(self._saved, Saved):
            check_averages(self._saved, self._model.prepared.averages)
        size = size_of(dataset)
        total_samples = self._order.spec.total_samples
        if self._order.spec.total_epochs is not None:
            total_samples = samples_in(self._order.spec.total_epochs, size)
            if self.is_main:
                self._parts.channel.send(TotalSamples(total_samples))
        if total_samples is None:
            raise BadInput(
                f'Trainer {self.trainer!r} has neither a number of samples nor of epochs '
                'to train: state one.'
            )
        self._state.total_samples = total_samples
        position = Position(
            self.samples,
            total_samples,
            self._order.spec.mode.seed,
            size,
            batch_size,
            self._order.spec.shards,
        )
        policy = NonFinitePolicy(
            self._order.spec.mode.on_nan, f'Trainer {self.trainer!r}, fragment {self.fragment}'
        )
        guard = TurnGuard(
            self._model.prepared,
            modules_among(sys._getframe(1).f_locals),
            reproducible=isinstance(self._order.spec.mode, Reproducible),
        )
        self._loop = TrainingLoop(self._parts, self._model, self._state, position, policy, guard)
        if self._saved is not None:
            check_position(position, self._saved)
            # The models hold its tensors now.
            self._saved, self._parts = None, replace(self._parts, saved=None)
        mode = self._order.spec.mode
        data_order = GlobalOrder(
            dataset_size=size,
            batch_size=mode.batch_size(batch_size, self.world_size)
            if isinstance(mode, Scaled)
            else batch_size,
            seed=self._order.spec.mode.seed,
            shuffle=shuffle,
            total_samples=total_samples,
            aligned=not isinstance(mode, Scaled),
        )
        return self._loop.run(BatchSource(data_order, dataset, collate_fn, num_workers))

    def finish(self) -> None:
        """Save what the user's function reported or changed after the loop.

        Raises
        ------
        BadInput
            If the function did not train to the total.
        """
        if self._loop is None:
            raise BadInput(
                'The function returned without ctx.loop: train in "for batch in '
                'ctx.loop(dataset, batch_size):".'
            )
        if not self._state.complete:
            raise BadInput(
                f'The function left ctx.loop after {self.samples} of '
                f'{self.total_samples} samples: let the loop end by itself, '
                f'and state a smaller total if that is enough.'
            )
        changed = self.is_main and self._state.extras() != self._state.saved_extras
        if self._division.pipelined or self._division.sharded:
            changed = bool(self._peers.largest((changed,))()[0])
        if changed:
            self._checkpointer.save_now(self._loop.to_save, self.samples, self._state.metrics)

    def outcome(self, how: Ending, error: RankError | None) -> Outcome:
        """The last message of this rank."""
        return self._checkpointer.outcome(how, error, self.samples, self._state.metrics)
