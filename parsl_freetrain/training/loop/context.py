"""The context: the first argument of the user's function."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch.utils.data import DataLoader

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import local
from parsl_freetrain.training.checkpoint.optimizer_state import move_to_parameters
from parsl_freetrain.training.checkpoint.state import (
    Position,
    Saved,
    check_averages,
    check_position,
    restore,
)
from parsl_freetrain.training.checkpoint.trainables import check_schedulers, sort_out
from parsl_freetrain.training.data.data_loaders import LoaderData, LoaderSettings
from parsl_freetrain.training.data.loader import seed_alike, size_of
from parsl_freetrain.training.data.sample_order import GlobalOrder, epoch_size
from parsl_freetrain.training.data.sampler import Sampler, order_name, sampled_order
from parsl_freetrain.training.data.stream import ENDLESS, NumberedStream, is_stream
from parsl_freetrain.training.loop import update_guard
from parsl_freetrain.training.loop.around_loop import AroundTheLoop
from parsl_freetrain.training.loop.epochs import PreparedLoader
from parsl_freetrain.training.loop.loop_lengths import LoopLengths
from parsl_freetrain.training.loop.rank_parts import BatchSource, Model, RankParts
from parsl_freetrain.training.loop.return_value import plain_text
from parsl_freetrain.training.loop.training_loop import FragmentEnd, TrainingLoop
from parsl_freetrain.training.spec.messages import (
    Ending,
    Outcome,
    RankError,
    StateLeft,
    TotalSamples,
)
from parsl_freetrain.training.spec.mode import Reproducible, Scaled
from parsl_freetrain.training.spec.on_nan import NonFinitePolicy
from parsl_freetrain.training.steps import lr
from parsl_freetrain.training.steps.modes import make_steps
from parsl_freetrain.training.steps.nonfinite import Watch


class FragmentContext(AroundTheLoop):
    """One fragment as one of its ranks sees it: the first argument of the user's function.

    Its attributes are those of :class:`~parsl_freetrain.training.loop.fragment_view.FragmentView`.
    """

    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        self._loops = 0
        self._loop_samples = 0  # at the end of the loop that was called last
        self._lengths = LoopLengths(self._order.spec)

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
        # Only here, as it imports FSDP2.
        from parsl_freetrain.training.parallel.sharded import shard_model

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
            tensors={s.tensor for of in self._order.spec.shapes.values() for s in of},
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
            All models with trained parameters, optimizers, learning rate schedulers, gradient
            scalers, and AveragedModels of torch. Also the DataLoader of the training, for
            "for batch in loader:" within :meth:`epochs`.
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
        loaders = [thing for thing in things if isinstance(thing, DataLoader)]
        others = tuple(thing for thing in things if not isinstance(thing, DataLoader))
        prepared = sort_out(others, named=self._division.stated, sharded=self._division.sharded)
        for model in (*prepared.models, *prepared.averages):
            model.to(self.device)
        for optimizer in prepared.optimizers:
            move_to_parameters(optimizer)
        if self._division.sharded:
            from parsl_freetrain.training.steps.sharded import check_sharded

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
            lambda: self._hooks.running,
        )
        steps.before_step.append(self._before_step)
        self._model = Model(prepared, self._division, steps, watch, self._hooks)
        for average in prepared.averages:
            self._take_average(average)
        self._checkpointer.timing.expect(
            3 * sum(local(tensor).nbytes for tensor in prepared.tensors()),
            self._saved.position.checkpoint_s if self._saved is not None else 0.0,
        )
        of = {
            id(thing): stand_in
            for kind in ('models', 'optimizers', 'schedulers')
            for thing, stand_in in zip(getattr(prepared, kind), getattr(steps, kind), strict=True)
        }
        of.update((id(thing), thing) for thing in (*prepared.scalers, *prepared.averages))
        of.update((id(loader), PreparedLoader(loader, self._epoch_of)) for loader in loaders)
        answers = tuple(of[id(thing)] for thing in things)
        return answers[0] if len(answers) == 1 else answers

    def _epoch_of(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._epochs is None:
            raise BadInput(
                'A DataLoader that was given to ctx.prepare was iterated over outside of '
                'ctx.epochs(): say "for epoch in ctx.epochs():" around it, or keep it out of '
                'ctx.prepare if it is not for the training.'
            )
        return self.loop(loader)

    def _before_step(self) -> None:
        mode = self._order.spec.mode
        if self._hooks.before_step and isinstance(mode, Reproducible):
            seed_alike(self._state.samples, mode.seed, 'before step')
        self._hooks.run(self._hooks.before_step)

    def loop(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        micro_batch: int | None = None,
        epochs: float | None = None,
        samples: int | None = None,
        shuffle: bool = True,
        sampler: Sampler | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> Iterator[Any]:
        """Batches from the current position to the total. Replaces the loop over epochs and the
        DataLoader.

        When the fragment has to stop, the loop ends the function by an exception that is not an
        ``Exception``. Code after the loop runs only when the total has been trained. The last
        checkpoint is written when the function returns.

        A function may have several loops, one after the other. Each but the last one then says how
        much it trains; the last one trains the rest of the total. Within :meth:`epochs` it trains
        one epoch.

        Parameters
        ----------
        dataset
            A map-style dataset: it has a length and an index. Or a stream, such as an
            IterableDataset, which every rank reads in the same order; then each rank gets its own
            samples of it, and the total is in samples. Or a DataLoader of one of these, with its
            settings; then leave out ``batch_size`` and those below.
        batch_size
            Number of samples in a global batch, over all ranks: what one optimizer step sees. In
            scaled mode, the number for the reference number of ranks.
        micro_batch
            Maximum number of samples in one forward and backward pass of a rank. The body of the
            loop then runs several times for a global batch, and the gradients are added up.
        epochs, samples
            How much this loop trains, if the function has several; in the unit of the total.
        shuffle
            Whether each epoch has its own random order. A stream keeps its order.
        sampler
            In place of ``shuffle``, the order of all ranks' samples: indices, a sampler of torch
            (weighted, for instance), or a function that gives the indices of an epoch, from 0.
        drop_last
            Whether to leave out the last batch of an epoch if it is short.
        collate_fn, num_workers, worker_init_fn
            As in DataLoader. Workers stay for the whole fragment.

        Raises
        ------
        BadInput
            If :meth:`prepare` was not called, an earlier loop has not ended, the loops are longer
            than the total, or the data have changed since the last checkpoint.
        """
        if self._model is None:
            raise BadInput(
                'ctx.loop was called before ctx.prepare: prepare models, optimizers and '
                'schedulers first.'
            )
        if self._loop is not None and not (self._state.complete or self._epochs):
            raise BadInput(self._left_early())
        if micro_batch is not None and micro_batch < 1:
            raise BadInput(f'ctx.loop was given micro_batch={micro_batch}; it must be 1 or more.')
        check_schedulers(self._model.prepared)
        own = LoaderSettings(shuffle, collate_fn, num_workers, sampler, drop_last, worker_init_fn)
        if isinstance(dataset, PreparedLoader):
            dataset = dataset.loader
        data = LoaderData.of_loop(dataset, batch_size, own)
        if self._epochs is not None and not self._state.complete:
            self._epochs.begin_loop(data.dataset, epochs, samples)
            if self._loop is not None:
                return self._epochs.micro_batches(data, micro_batch)
        dataset, batch_size = data.dataset, data.batch_size
        size, stream = ENDLESS, None
        if is_stream(dataset):
            self._lengths.check_stream(epochs)
            data.check_stream()
            dataset = stream = NumberedStream(dataset, self._order.spec.mode.seed)
        else:
            size = size_of(dataset)
        chosen = sampled_order(data.sampler, size, self._order.spec.mode.seed, self._peers)
        ordered = chosen.size if chosen is not None else size
        self._loops += 1
        here, saved = self._saved is None or self._loops == self._saved.position.loop, self._saved
        if here:
            base = saved.position.base if saved is not None else self.samples
        else:
            base = self._loop_samples
        in_epoch = epoch_size(ordered, batch_size, data.drop_last)
        length, total = self._lengths.next(base, in_epoch, epochs, samples)
        self._loop_samples = base + length
        if self._state.finished_early or not here:
            return iter(())
        self._state.total_samples = total
        if self.is_main and self._order.spec.total_epochs is not None:
            self._parts.channel.send(TotalSamples(total))
        spec, mode = self._order.spec, self._order.spec.mode
        if stream is not None and saved is not None:
            stream.marks.update(saved.position.marks)
        position = Position(
            self.samples,
            total,
            mode.seed,
            size,
            batch_size,
            spec.shards,
            loop=self._loops,
            base=base,
            marks=stream.marks if stream is not None else {},
            order=order_name(chosen, data.shuffle and stream is None, data.drop_last),
        )
        names = update_guard.names_around()
        if not isinstance(mode, Reproducible):  # it refuses these in other ways
            update_guard.check_left_out(self._model.prepared, names)
        guard = update_guard.UpdateGuard(
            self._model.prepared,
            update_guard.among(names, torch.nn.Module),
            reproducible=isinstance(mode, Reproducible),
            averages=self._averages,
        )
        policy = NonFinitePolicy(mode.on_nan, f'Trainer {self.trainer!r}, fragment {self.fragment}')
        self._state.complete = False
        self._loop = TrainingLoop(self._parts, self._model, self._state, position, policy, guard)
        if saved is not None:
            if isinstance(saved, Saved):
                check_averages(saved, self._model.prepared.averages)
            check_position(position, saved)
            self._state.epoch_due = saved.position.epoch_due
            # The models hold its tensors now.
            self._saved, self._parts = None, replace(self._parts, saved=None)
            if saved.position.finished and saved.position.total_samples == total:
                self._state.finished, self._state.result = True, saved.position.result
                raise FragmentEnd
        if stream is not None and self.samples < base + length:
            stream.check_same(self.samples - base, self._peers)
        if isinstance(mode, Scaled):
            batch_size = mode.batch_size(batch_size, self.world_size)
        self._model.steps.limit(micro_batch, batch_size)
        data_order = GlobalOrder(
            dataset_size=ordered,
            batch_size=batch_size,
            seed=mode.seed,
            shuffle=data.shuffle and stream is None,
            total_samples=length,
            aligned=not isinstance(mode, Scaled),
            sampler=chosen,
            drop_last=data.drop_last,
        )
        batches = self._loop.run(BatchSource(data_order, dataset, data, base))
        if self._epochs is None:
            return batches
        return self._epochs.micro_batches(data, micro_batch, batches)

    def _left_early(self) -> str:
        return (
            f'The function left ctx.loop after {self.samples} of {self.total_samples} samples: let '
            'the loop end by itself; say ctx.finish_early(reason) where the training is good '
            'enough, or state a smaller total.'
        )

    def finish(self, returned: object) -> None:
        """Write the last checkpoint, after the function has returned.

        Raises
        ------
        BadInput
            If the function did not train to the total, or did not return a plain value.
        """
        if self._state.finished:
            return
        if self._epochs is not None:
            self._epochs.left()
        if self._loop is None:
            raise BadInput(
                'The function returned without ctx.loop: train in "for batch in '
                'ctx.loop(dataset, batch_size):".'
            )
        trained = self._state.finished_early or self.samples == self.total_samples
        if not (self._state.complete and trained):
            raise BadInput(self._left_early())
        self._state.result = plain_text(returned)
        self._loop.save_last()

    def outcome(self, how: Ending, error: RankError | None) -> Outcome:
        """The last message of this rank."""
        left = self._leave() if how == 'peer-lost' else None
        outcome = self._checkpointer.outcome(how, error, self.samples, self._state.metrics, left)
        return structs.replace(outcome, result=self._state.result) if how == 'finished' else outcome

    def _leave(self) -> StateLeft | None:
        try:
            return self._loop.leave() if self._loop is not None else None
        except Exception:  # the next fragment reads the checkpoint
            traceback.print_exc()
            return None
