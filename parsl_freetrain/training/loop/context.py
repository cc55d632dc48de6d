"""The context: the first argument of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Shape
from parsl_freetrain.training.checkpoint.state import Position, check_position, restore
from parsl_freetrain.training.checkpoint.trainables import check_schedulers, sort_out
from parsl_freetrain.training.data.loader import size_of
from parsl_freetrain.training.data.order import GlobalOrder, samples_in
from parsl_freetrain.training.loop.training_loop import (
    BatchSource,
    LoopState,
    Model,
    RankParts,
    TrainingLoop,
)
from parsl_freetrain.training.spec.messages import Ending, Outcome, RankError, TotalSamples
from parsl_freetrain.training.spec.mode import Scaled
from parsl_freetrain.training.spec.on_nan import NonFinitePolicy
from parsl_freetrain.training.steps import lr
from parsl_freetrain.training.steps.mesh import Division
from parsl_freetrain.training.steps.modes import make_steps
from parsl_freetrain.training.steps.nonfinite import Watch


class FragmentContext:
    """One fragment as one of its ranks sees it.

    Attributes
    ----------
    trainer, fragment
        The trainer's name and the number of this fragment.
    rank, world_size, local_rank, nodes
        This rank among all ranks and on its node, the number of ranks, and the number of nodes.
    device
        The device of models and batches.
    samples
        Number of training samples so far, over all fragments and ranks.
    total_samples
        Number of samples to train; None until :meth:`loop` knows it, if the total is in epochs.
    epoch
        The current epoch, from 0.
    last_of_epoch
        Whether the current batch is part of the last global batch of its epoch.
    stopped
        Whether the fragment ended before the total.
    state
        The user's own dict, saved in every checkpoint. It must be valid JSON; rank 0's dict is
        saved.
    """

    def __init__(self, parts: RankParts) -> None:
        order, place, saved = parts.order, parts.place, parts.saved
        self._parts, self._order, self._saved = parts, order, saved
        self._peers, self._checkpointer = parts.peers, parts.checkpointer
        self.trainer, self.fragment, self.device = order.trainer, order.fragment, parts.device
        self.rank, self.world_size = place.rank, place.world_size
        self.local_rank, self.nodes = place.local_rank, place.nodes
        self._division = Division(order, place, parts.device)
        samples = saved.position.samples if saved is not None else 0
        total_samples = order.spec.total_samples
        if saved is not None and total_samples is None:
            total_samples = saved.position.total_samples
        last = self._checkpointer.last
        self._state = LoopState(
            samples,
            total_samples,
            reached=samples,
            metrics=dict(last.metrics) if last is not None else {},
            user=dict(saved.position.user) if saved is not None else {},
        )
        self._state.saved_extras = self._state.extras()
        self._model: Model | None = None
        self._loop: TrainingLoop | None = None

    @property
    def samples(self) -> int:
        return self._state.samples

    @property
    def total_samples(self) -> int | None:
        return self._state.total_samples

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def last_of_epoch(self) -> bool:
        return self._state.last_of_epoch

    @property
    def stopped(self) -> bool:
        return self._state.stopped

    @property
    def state(self) -> dict[str, Any]:
        return self._state.user

    @state.setter
    def state(self, value: dict[str, Any]) -> None:
        self._state.user = value

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    @property
    def shape(self) -> Shape:
        """How the ranks of this fragment share the work. If the trainer has no ``shapes``, every
        rank trains its own samples.
        """
        return self._division.shape

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's DeviceMesh, with the dimensions
        :data:`~parsl_freetrain.core.model.types.MESH`. Ranks count along the last dimension first.

        The mesh and its process groups are created on first use. All ranks must use it first at the
        same point of the function.
        """
        return self._division.mesh

    def time_left(self) -> float:
        """Seconds until the nodes are taken away; infinite if unknown."""
        return self._checkpointer.time_left()

    def should_stop(self) -> bool:
        """Whether this rank knows of a reason to stop. The loop stops by itself; only long work
        outside of it needs to ask.
        """
        return self._parts.inbox.stop_requested() or self._checkpointer.must_stop(1)

    def samples_lr(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]
    ) -> torch.optim.lr_scheduler.LambdaLR:
        """A learning rate scheduler by samples instead of steps, so that the schedule is the same
        for any number of nodes.

        Parameters
        ----------
        optimizer
            The optimizer, before :meth:`prepare`.
        factor
            A function of the number of samples seen before a batch, by all ranks in all fragments.
            It returns the factor by which the initial learning rate is multiplied in that batch.

        Returns
        -------
        torch.optim.lr_scheduler.LambdaLR
            Pass it to :meth:`prepare`, and call its ``step()`` once per batch, after the
            optimizer's.
        """
        return lr.by_samples(optimizer, factor, lambda: self._state.reached)

    def report(self, **metrics: float) -> None:
        """Report numbers by name. Rank 0's last values are shown and saved with checkpoints.

        Raises
        ------
        TypeError
            If a value is not a number.
        """
        for name, value in metrics.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                self._state.metrics[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(
                    f'ctx.report was given {name}={value!r}, a {type(value).__name__}; '
                    'it takes numbers.'
                ) from None

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
        if self._saved is not None:
            restore(prepared, self._saved, parts=self._division.pipelined)
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
        self._model = Model(prepared, self._division, steps, watch)
        self._checkpointer.expect(
            3 * sum(tensor.nbytes for tensor in prepared.tensors()),
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
        self._loop = TrainingLoop(self._parts, self._model, self._state, position, policy)
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
        if self._division.pipelined:
            changed = bool(self._peers.largest((changed,))()[0])
        if changed:
            self._checkpointer.save_now(self._loop.to_save, self.samples, self._state.metrics)

    def outcome(self, how: Ending, error: RankError | None) -> Outcome:
        """The last message of this rank."""
        return self._checkpointer.outcome(how, error, self.samples, self._state.metrics)
