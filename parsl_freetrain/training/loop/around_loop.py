"""What the user asks for around the loop: functions at the step and at the end of an epoch, moving
averages, evaluation, and an early end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.state import Saved, restore_average
from parsl_freetrain.training.loop.epochs import Epochs
from parsl_freetrain.training.loop.evaluation import EvaluationData, Measure, evaluate
from parsl_freetrain.training.loop.fragment_view import FragmentView
from parsl_freetrain.training.loop.hooks import Hooks, MovingAverage
from parsl_freetrain.training.loop.prepared_average import PreparedAverage
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.loop.training_loop import EvaluationStopped, TrainingLoop
from parsl_freetrain.training.spec.mode import Reproducible


class AroundTheLoop(FragmentView):
    """The part of the context that acts around the loop."""

    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        self._hooks = Hooks()
        self._model: Model | None = None
        self._loop: TrainingLoop | None = None
        self._averages: list[PreparedAverage] = []
        self._epochs: Epochs | None = None

    def before_step(self, function: Callable[[], object]) -> None:
        """Call a function once per global batch, on all ranks, when the gradient of the global
        batch is known and before it is clipped and used. There it may be read and changed.
        """
        self._add(self._hooks.before_step, function, 'before_step')

    def after_step(self, function: Callable[[], object]) -> None:
        """Call a function once per global batch, on all ranks, after the step of the optimizers.
        There, parameters may be read and changed, in the same way on all ranks. Steps that
        ``on_nan`` has skipped do not count.
        """
        self._add(self._hooks.after_step, function, 'after_step')

    def each_epoch(self, function: Callable[[], object]) -> None:
        """Call a function at the end of each epoch, once, on all ranks, after the step of its last
        global batch. It belongs to the epoch: a checkpoint is written before it or after it.
        """
        self._add(self._hooks.each_epoch, function, 'each_epoch')

    def _add(self, hooks: list[Any], function: Any, name: str) -> None:
        if not callable(function):
            raise BadInput(
                f'ctx.{name} was given a {type(function).__name__}; it takes a function without '
                f'arguments, such as ctx.{name}(lambda: ...).'
            )
        if self._state.reports.in_micro_batch:
            raise BadInput(
                f'ctx.{name} was called in the body of ctx.loop, where each iteration would add '
                'the function once more: call it before the loop.'
            )
        hooks.append(function)

    def epochs(self) -> Iterator[int]:
        """The numbers of the epochs that are left, for a loop over epochs around :meth:`loop`::

            for epoch in ctx.epochs():
                for batch in ctx.loop(loader):
                    ...
                scheduler.step()

        What is done behind ``ctx.loop`` belongs to the end of the epoch, as with
        :meth:`each_epoch`. It is done once, on all ranks, and ``ctx.evaluate``, ``ctx.checkpoint``
        and ``ctx.finish_early`` may be called there. So may ``break``, which ends the training
        early; all ranks must do it alike. A fragment that begins within an epoch repeats what is
        before ``ctx.loop``.

        Raises
        ------
        BadInput
            If it is called twice, before :meth:`prepare` or after :meth:`loop`, or if training may
            go back (``on_nan='rollback'``). Later, if an epoch has not exactly one ``ctx.loop``,
            with the same data in each, or if what is saved changes before it.
        """
        if self._model is None or self._loop is not None or self._epochs is not None:
            raise BadInput(
                'ctx.epochs must be called once, after ctx.prepare and around the only ctx.loop: '
                '"for epoch in ctx.epochs():".'
            )
        self._epochs = Epochs(self._order.spec, self._state, self._model)
        self._hooks.by_epochs = True
        return iter(self._epochs)

    def finish_early(self, reason: str) -> None:
        """End the training before the total. The trainer counts as finished.

        One rank suffices, and all ranks may call it. In a function given to :meth:`each_epoch`,
        training ends there; elsewhere, the loop ends after this or one of the next global batches.
        """
        self._state.finishing = reason or 'no reason was given'

    def checkpoint(self, best: float | None = None) -> None:
        """Write a checkpoint at the end of this epoch.

        Parameters
        ----------
        best
            The value by which the best of these checkpoints is chosen, which is then kept: the
            smallest, or with ``Retention(mode='max')`` the largest. It is the metric 'best' of the
            checkpoint.

        Raises
        ------
        BadInput
            If it is not called at the end of an epoch (:meth:`each_epoch`, :meth:`epochs`).
        """
        if not self._state.at_epoch_end:
            raise BadInput(
                'ctx.checkpoint was called outside of the end of an epoch: call it in a function '
                'that is given to ctx.each_epoch, or within ctx.epochs() behind ctx.loop.'
            )
        self._state.wants_checkpoint = True
        self._state.best = None if best is None else float(best)

    def evaluate(
        self,
        model: torch.nn.Module,
        dataset: Any,
        measure: Measure,
        *,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
    ) -> dict[str, float]:
        """Evaluate a model on a dataset. All ranks must call this, and share the work; the result
        is the same for any number of them, and on all ranks.

        The model is in evaluation mode and no gradients are computed. If the fragment has to stop
        during an evaluation at the end of an epoch, the next fragment repeats all that is done at
        the end of that epoch.

        Parameters
        ----------
        model
            Any model; of one that :meth:`prepare` has wrapped, the model itself is evaluated.
        dataset
            A map-style dataset.
        measure
            A function of the model and a batch. It returns a dict: by metric one value per sample,
            as a tensor of shape (batch size,), or a pair (sum, number).
        batch_size
            Number of samples in a batch of one rank.
        collate_fn, num_workers
            As in DataLoader.

        Returns
        -------
        dict
            By metric, the mean over all samples, or the sum divided by the number.

        Raises
        ------
        BadInput
            If it is called in the body of the loop, the model is divided into stages, or
            ``measure`` returns something else.
        """
        if self._state.reports.in_micro_batch:
            raise BadInput(
                'ctx.evaluate was called in the body of ctx.loop: call it in a function that is '
                'given to ctx.each_epoch, or behind the loop.'
            )
        if self._division.pipelined:
            raise BadInput('ctx.evaluate cannot evaluate a model that is divided into stages.')
        if isinstance(model, DistributedDataParallel):
            model = model.module
        mode = self._order.spec.mode
        alike = not (self._division.grouped or self._division.sharded)
        if alike and not isinstance(mode, Reproducible):
            self._peers.broadcast(model.buffers())  # rank 0's are those that are saved
        stops = self._state.at_epoch_end and self._loop is not None
        try:
            return evaluate(
                model,
                EvaluationData(dataset, batch_size, collate_fn, num_workers, mode.seed),
                measure,
                self._peers,
                self.device,
                self._division.data_rank,
                self._division.parts,
                self._loop.may_stop() if stops and self._loop is not None else lambda: None,
            )
        except EvaluationStopped:
            if self._epochs is not None:
                self._epochs.stop()
            raise

    def _take_average(self, average: torch.nn.Module) -> None:
        """Update an average that was given to :meth:`prepare` after each step."""
        assert self._model is not None
        assert isinstance(average, AveragedModel)
        self._check_averages()
        if self._saved is None:
            tensors = (*average.parameters(), *average.buffers())
            self._division.make_equal((tensor.data for tensor in tensors), self._peers)
        taken = PreparedAverage(
            average,
            self._model.prepared.models,
            self._peers,
            lambda: self._state.reports.in_micro_batch,
        )
        self._averages.append(taken)
        self._hooks.after_step.insert(len(self._averages) - 1, taken.after_step)

    def _check_averages(self) -> None:
        if self._division.pipelined or self._division.sharded:
            raise BadInput(
                'A model that is divided among ranks cannot be averaged: leave out its average, or '
                'give the trainer shapes that divide only the data.'
            )

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
        self._check_averages()
        average = MovingAverage(source, decay)
        averages = (*self._model.prepared.averages, average.model)
        if isinstance(self._saved, Saved):
            restore_average(average.model, self._saved, len(averages) - 1)
        self._model = replace(
            self._model, prepared=replace(self._model.prepared, averages=averages)
        )
        self._hooks.after_step.insert(len(averages) - 1, average.update)
        return average.model
