"""``for epoch in ctx.epochs()``: the user's own loop over epochs, around ``ctx.loop``."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from torch.utils.data import DataLoader

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.data.loader import seed_alike
from parsl_freetrain.training.data.loader_settings import LoaderData, LoaderSettings
from parsl_freetrain.training.data.own_generators import own_generators
from parsl_freetrain.training.data.stream import is_stream
from parsl_freetrain.training.data.together import Together
from parsl_freetrain.training.loop.last_step import Surroundings, around_models
from parsl_freetrain.training.loop.loop_data import LoopCall
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.places import variables
from parsl_freetrain.training.loop.rank_parts import Model
from parsl_freetrain.training.loop.training_loop import END_OF_EPOCH
from parsl_freetrain.training.loop.wishes import EvaluationStopped
from parsl_freetrain.training.spec.mode import ROLLBACK, Reproducible
from parsl_freetrain.training.spec.training import TrainingSpec


class _Place(Enum):
    BEFORE_LOOP = auto()
    IN_LOOP = auto()
    BEHIND_LOOP = auto()
    ENDED = auto()


class EpochLoop:
    """Divides batches among epochs. A stopped fragment repeats what is before ``ctx.loop``, and
    undoes it; what is behind it belongs to the epoch's end. BadInput if training may go back an
    epoch. ``before``: what surrounded the models where the epoch began.
    """

    def __init__(self, spec: TrainingSpec, state: LoopState, model: Model) -> None:
        if spec.mode.on_nan == ROLLBACK:
            raise BadInput(
                "ctx.epochs cannot go back to an earlier epoch, as on_nan='rollback' may: use "
                'ctx.loop alone, and ctx.each_epoch(fn) for what is done at the end of an epoch.'
            )
        self._mode, self._state, self._model = spec.mode, state, model
        self._place = _Place.ENDED
        self._batches: Iterator[Any] = iter(())
        self._data: list[Any] = []
        self.before = self._now()

    def __iter__(self) -> Iterator[int]:
        self._model.modules.put_back()
        self._model.carried.put_back('epoch')
        self._model.carried.begin_epoch()
        own_generators.find(variables())  # what is before ctx.loop may draw from them
        while not self._state.loop_over:
            # Only the first epoch of a fragment may have begun before it.
            self._place, self.before = _Place.BEFORE_LOOP, self._now(bits=not self._data)
            if isinstance(self._mode, Reproducible):
                seed_alike(self._state.epoch, self._mode.seed, 'before an epoch')
            self._state.between_epochs_s = -time.monotonic()
            yield self._state.epoch
            self._model.carried.begin_epoch()
            self._end()

    def begin_loop(self, call: LoopCall) -> None:
        """Call in ``ctx.loop``; raises BadInput if it may not be called now, or not like this."""
        if is_stream(call.data.dataset):
            raise BadInput(
                'ctx.loop was given a stream within ctx.epochs(), but a stream has no epochs: '
                'leave out ctx.epochs(), and state how much to train in samples.'
            )
        if call.epochs is not None or call.samples is not None:
            raise BadInput(
                'ctx.loop was given epochs or samples within ctx.epochs(), where it trains one '
                'epoch: leave them out.'
            )
        if self._place is _Place.IN_LOOP:
            raise BadInput(self._left_early())
        if self._place is not _Place.BEFORE_LOOP:
            raise BadInput(
                'ctx.loop was called twice within an epoch of ctx.epochs(): call it once, and keep '
                'DataLoaders for validation out of ctx.prepare. For several phases use '
                'ctx.loop(..., epochs=...) without ctx.epochs().'
            )
        now, groups = self._now(), [*map(len, self.before.groups)]
        other = self.before.user != now.user
        if other or groups != [*map(len, now.groups)]:
            changed = 'ctx.state' if other else 'the number of groups of an optimizer'
            raise BadInput(
                f'Between "for epoch in ctx.epochs():" and ctx.loop, {changed} changed. A fragment '
                'that begins within an epoch repeats these lines, so the result would depend on '
                'the nodes: do it behind ctx.loop, which is the end of the epoch, or before '
                'ctx.epochs().'
            )

    def micro_batches(self, call: LoopCall, batches: Iterator[Any] | None = None) -> Iterator[Any]:
        """Those of one epoch. ``batches``: those of the training loop, in the first epoch."""
        self._state.between_epochs_s += time.monotonic()
        given = [*vars(call.data).values(), call.micro_batch]
        if batches is not None:
            self._batches, self._data = batches, given
        elif any(
            not (one is other or (isinstance(one, int) and one == other))
            for one, other in zip(given, self._data, strict=True)
        ):
            raise BadInput(
                f'ctx.loop was given other data or settings in epoch {self._state.epoch} than '
                'before: within ctx.epochs() they are the same in each epoch, so make the dataset '
                'and its functions before. Weights, or data that differ by epoch, are a sampler of '
                'ctx.loop.'
            )
        self._place = _Place.IN_LOOP
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[Any]:
        for batch in self._batches:
            if batch is END_OF_EPOCH:
                break
            yield batch
        self._place = _Place.BEHIND_LOOP

    def stop(self) -> None:
        """End the fragment, if the user's own evaluation behind the loop was stopped."""
        if self._place is _Place.BEHIND_LOOP:
            # The training loop waits at the end of the epoch, and ends the fragment there.
            self._batches.throw(EvaluationStopped())  # type: ignore[attr-defined]

    def left(self) -> None:
        """The function returned; at an epoch's end (``break``), training ends early."""
        if self._place is _Place.BEHIND_LOOP:
            self._state.finishing = self._state.finishing or 'the function left ctx.epochs()'
            self._end()

    def _end(self) -> None:
        if self._place is _Place.BEFORE_LOOP:
            raise BadInput(
                f'Epoch {self._state.epoch} of ctx.epochs() ended without ctx.loop: train in '
                '"for batch in ctx.loop(dataset, batch_size):" within it.'
            )
        if self._place is _Place.IN_LOOP:
            raise BadInput(self._left_early())
        self._place = _Place.ENDED
        next(self._batches, None)  # ends the epoch on all ranks together
        if not self._state.loop_over:
            self._state.epoch += 1

    def _left_early(self) -> str:
        return (
            f'The function left ctx.loop within epoch {self._state.epoch}: let ctx.loop end by '
            'itself; say ctx.finish_early(reason) in it where the training is good enough.'
        )

    def _now(self, *, bits: bool = False) -> Surroundings:
        return around_models(self._state, self._model.prepared, bits=bits)


class PreparedLoader:
    """Stands for a prepared DataLoader, whose iteration is ``ctx.loop``."""

    def __init__(self, loader: Any, loop: Callable[[Any], Iterator[Any]]) -> None:
        self.loader, self._loop = loader, loop

    def __iter__(self) -> Iterator[Any]:
        return self._loop(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def data_of(
    dataset: Any, batch_size: int | None, own: LoaderSettings, accumulate: int
) -> LoaderData:
    """The arguments of ``ctx.loop``, which may be several DataLoaders."""
    several = isinstance(dataset, tuple) and all(
        isinstance(one, (DataLoader, PreparedLoader)) for one in dataset
    )
    loaders = [
        LoaderData.of_loop(getattr(one, 'loader', one), batch_size, own)
        for one in (dataset if several else (dataset,))
    ]
    data = Together.of(loaders) if several else loaders[0]
    return replace(data, batch_size=accumulate * data.batch_size)
