"""What the user's function gets as its first argument."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.data import Plan, Turn, make_loader, seed_everything, size_of, to_device
from parsl_freetrain.training.fragment import REPRODUCIBLE, FragmentOrder, RankPlace
from parsl_freetrain.training.inbox import Inbox
from parsl_freetrain.training.keeper import Keeper
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.prepared import Prepared, check_schedulers, sort_out
from parsl_freetrain.training.reproducible import ReproducibleSteps
from parsl_freetrain.training.sampling import GlobalBatch, GlobalOrder, samples_in
from parsl_freetrain.training.state import Position, Saved, check_position, restore, write_state
from parsl_freetrain.training.throughput import ThroughputSteps

PROGRESS_EVERY_S = 0.5
_GO_ON, _SAVE, _STOP = 0, 1, 2


class FragmentEnd(BaseException):
    """Leaves the user's function when the fragment ends before the total is reached; the state is saved."""


class Steps(Protocol):
    """How turns of the user's loop make up the steps of the optimizer; see :mod:`.reproducible` and :mod:`.throughput`."""

    delay: int

    @property
    def models(self) -> tuple[torch.nn.Module, ...]: ...
    @property
    def optimizers(self) -> tuple[Any, ...]: ...
    @property
    def schedulers(self) -> tuple[Any, ...]: ...
    def turns(self, batch: GlobalBatch) -> list[Turn]: ...
    def begin(self, batch: GlobalBatch) -> None: ...
    def begin_turn(self, turn: Turn) -> None: ...
    def end_turn(self) -> None: ...
    def end(self, wish: int) -> int: ...


class FragmentContext:
    """One fragment as one of its ranks sees it.

    Attributes
    ----------
    trainer, fragment
        The trainer's name and the number of this fragment.
    rank, world_size, local_rank, nodes
        This rank among all and on its node, and how many nodes there are.
    device
        Where the models are moved to and batches come from.
    samples
        Training samples seen so far, over all fragments and ranks.
    total_samples
        What is trained in total; None until :meth:`loop` knows it from epochs.
    epoch
        The current epoch, from 0.
    last_of_epoch
        Whether the turn belongs to the last global batch of its epoch (for what is done once per epoch).
    state
        The user's own dict, saved in every checkpoint (rank 0's counts); what JSON can hold.
    """

    def __init__(self, order: FragmentOrder, place: RankPlace, peers: Peers, channel: Channel, inbox: Inbox, keeper: Keeper,
                 device: torch.device, saved: Saved | None) -> None:
        self._order, self._peers, self._channel, self._inbox, self._keeper, self._saved = order, peers, channel, inbox, keeper, saved
        self.trainer, self.fragment = order.trainer, order.fragment
        self.rank, self.world_size, self.local_rank, self.nodes = place.rank, place.world_size, place.local_rank, place.nodes
        self.device = device
        self.samples = saved.position.samples if saved is not None else 0
        self.total_samples = order.total_samples
        if saved is not None and self.total_samples is None:
            self.total_samples = saved.position.total_samples
        self.epoch = 0
        self.last_of_epoch = False
        self.state: dict[str, Any] = dict(saved.position.user) if saved is not None else {}
        self._metrics: dict[str, float] = dict(keeper.last.metrics) if keeper.last is not None else {}
        self._saved_extras = self._extras()
        self._prepared = Prepared()
        self._steps: Steps | None = None
        self._position: Position | None = None
        self._complete = False
        self._stopped = False
        self._told_at = 0.0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0

    @property
    def stopped(self) -> bool:
        """Whether the fragment ended before the total."""
        return self._stopped

    def time_left(self) -> float:
        """Seconds until the nodes go; infinite where unknown."""
        return self._keeper.time_left()

    def should_stop(self) -> bool:
        """Whether this rank knows of a reason to stop; the loop stops by itself, so only long work outside of it needs to ask."""
        return self._inbox.stop_requested() or self._keeper.must_stop(1)

    def report(self, **metrics: float) -> None:
        """Report numbers by name; rank 0's last ones are shown and kept with checkpoints.

        Raises
        ------
        TypeError
            If a value is not a number.
        """
        for name, value in metrics.items():
            try:
                if isinstance(value, (str, bytes)):
                    raise TypeError
                self._metrics[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise TypeError(f'ctx.report was given {name}={value!r}, a {type(value).__name__}; it takes numbers.') from None

    def prepare(self, *things: Any, clip_grad_norm: float | None = None, find_unused_parameters: bool = False) -> Any:
        """Make models, optimizers and schedulers ready for :meth:`loop`, and bring them to the last checkpoint's state.

        Parameters
        ----------
        *things
            All models (of which the parameters are trained), optimizers and learning rate schedulers.
        clip_grad_norm
            Clip the gradient of the global batch to this norm.
        find_unused_parameters
            As DDP has it; throughput mode only.

        Returns
        -------
        As many as were given, in the same order; use these from now on.

        Raises
        ------
        BadInput
            If it is called twice, is given something else, or the checkpoint is of another model.
        """
        if self._steps is not None:
            raise BadInput('ctx.prepare was called twice: call it once, with all models, optimizers and schedulers.')
        self._prepared = sort_out(things)
        for model in self._prepared.models:
            model.to(self.device)
        if self._saved is not None:
            restore(self._prepared, self._saved)
        else:
            self._peers.broadcast(tensor.data for tensor in self._prepared.tensors())
        steps: Steps
        if self._order.mode == REPRODUCIBLE:
            steps = ReproducibleSteps(self._prepared, self._peers, self._order.shards, clip_grad_norm, self.device)
        else:
            steps = ThroughputSteps(self._prepared, self._peers, clip_grad_norm, find_unused_parameters, self.device)
        self._steps = steps
        self._keeper.expect(3 * sum(tensor.nbytes for tensor in self._prepared.tensors()),
                            self._saved.position.checkpoint_s if self._saved is not None else 0.0)
        of = {id(thing): stand_in for kind in ('models', 'optimizers', 'schedulers')
              for thing, stand_in in zip(getattr(self._prepared, kind), getattr(steps, kind), strict=True)}
        answers = tuple(of[id(thing)] for thing in things)
        return answers[0] if len(answers) == 1 else answers

    def loop(self, dataset: Any, batch_size: int, *, shuffle: bool = True, collate_fn: Callable[[list[Any]], Any] | None = None,
             num_workers: int = 0) -> Iterator[Any]:
        """Batches from where training is to its total; takes the place of the loop over epochs and of the DataLoader.

        Ends the function (by an exception that is not an ``Exception``) when the fragment has to stop; what comes after the loop is
        reached only once the total has been trained and saved.

        Parameters
        ----------
        dataset
            Map-style: a length and an index.
        batch_size
            Samples of a global batch, over all ranks: what one optimizer step sees.
        shuffle
            Whether each epoch has its own random order.
        collate_fn, num_workers
            As DataLoader has them.

        Raises
        ------
        BadInput
            If :meth:`prepare` was not called, or the loop is called twice, or the data have changed since the last checkpoint.
        """
        if self._steps is None:
            raise BadInput('ctx.loop was called before ctx.prepare: prepare models, optimizers and schedulers first.')
        if self._position is not None:
            raise BadInput('ctx.loop was called twice: one loop trains up to the total; for phases, look at ctx.samples or ctx.epoch '
                           'in it.')
        check_schedulers(self._prepared)
        size = size_of(dataset)
        if self._order.total_epochs is not None:
            self.total_samples = samples_in(self._order.total_epochs, size)
            if self.is_main:
                self._channel.send({'kind': 'total', 'total_samples': self.total_samples})
        else:
            self.total_samples = self._order.total_samples
        if self.total_samples is None:
            raise BadInput(f'Trainer {self.trainer!r} has neither a number of samples nor of epochs to train: state one.')
        self._position = Position(self.samples, self.total_samples, self._order.seed, size, batch_size,
                                  self._order.shards if self._order.mode == REPRODUCIBLE else 0)
        if self._saved is not None:
            check_position(self._position, self._saved)
            self._saved = None  # its tensors are in the models now
        data_order = GlobalOrder(dataset_size=size, batch_size=batch_size, seed=self._order.seed, shuffle=shuffle,
                                 total_samples=self.total_samples)
        return self._turns(self._steps, data_order, dataset, collate_fn, num_workers)

    def finish(self) -> None:
        """After the user's function has returned: keep what it reported or changed behind the loop.

        Raises
        ------
        BadInput
            If it did not train to the total.
        """
        if self._position is None:
            raise BadInput('The function returned without ctx.loop: train in "for batch in ctx.loop(dataset, batch_size):".')
        if not self._complete:
            raise BadInput(f'The function left ctx.loop after {self.samples} of {self.total_samples} samples: let the loop end by itself, '
                           f'and state a smaller total if that is enough.')
        if self._extras() != self._saved_extras:
            self._save()

    def outcome(self, how: str, error: dict[str, Any] | None) -> dict[str, Any]:
        """The last message of a rank."""
        last = self._keeper.last
        return {'kind': 'outcome', 'how': how, 'samples': self.samples, 'path': last.path if last is not None else None,
                'metrics': dict(self._metrics), 'error': error}

    def _turns(self, steps: Steps, data_order: GlobalOrder, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None,
               num_workers: int) -> Iterator[Any]:
        seed, began_with = self._order.seed, self.samples

        def plan() -> Iterator[Turn]:
            return (turn for batch in data_order.batches(began_with) for turn in steps.turns(batch))
        size = self._position.dataset_size if self._position is not None else 0
        micro_batches = iter(make_loader(dataset, Plan(plan), seed, collate_fn, num_workers))
        began_at = time.monotonic()
        for batch in data_order.batches(began_with):
            batch_began_at = time.monotonic()
            self.epoch = batch.epoch
            self.last_of_epoch = (batch.samples_before + len(batch.indices)) % size == 0
            steps.begin(batch)
            if self.samples == began_with:
                self._channel.send({'kind': 'started', 'samples': self.samples, 'at': time.time()})
            for turn in steps.turns(batch):
                data = to_device(next(micro_batches), self.device)
                steps.begin_turn(turn)
                seed_everything(turn.seed(seed, 'model'))
                yield data
                steps.end_turn()
            decision = steps.end(self._wish(steps.delay))
            self.samples = batch.samples_before + len(batch.indices)
            now = time.monotonic()
            self._keeper.step_took(now - batch_began_at)
            self._tell_progress((self.samples - began_with) / (now - began_at))
            if self.samples == self.total_samples:
                break
            if decision != _GO_ON:
                self._save(tidy=decision == _SAVE)
            if decision == _STOP:
                self._stopped = True
                raise FragmentEnd
        if self.samples > began_with:
            self._save()
        self._complete = True

    def _wish(self, delay: int) -> int:
        if self._inbox.stop_requested():
            return _STOP
        if not self.is_main:
            return _GO_ON
        if self._keeper.must_stop(1 + delay):
            return _STOP
        return _SAVE if self._keeper.wants_to_save() else _GO_ON

    def _tell_progress(self, rate: float) -> None:
        now = time.monotonic()
        if self.is_main and now - self._told_at >= PROGRESS_EVERY_S:
            self._told_at = now
            # Whoever listens may be busy; training does not wait for it.
            self._channel.send({'kind': 'progress', 'samples': self.samples, 'metrics': self._metrics, 'rate': rate, 'at': time.time()},
                               wait=False)

    def _extras(self) -> str:
        try:
            return json.dumps([self._metrics, self.state], sort_keys=True)
        except (TypeError, ValueError) as error:
            raise BadInput(f'ctx.state cannot be saved ({error}): keep texts, numbers, lists and dicts in it.') from error

    def _save(self, *, tidy: bool = True) -> None:
        if not self.is_main:
            return
        assert self._position is not None
        extras = self._extras()
        now = Position(**{**vars(self._position), 'samples': self.samples, 'checkpoint_s': self._keeper.longest_s, 'user': self.state})

        def write(folder: Path) -> None:
            write_state(folder, self._prepared, now)
        self._keeper.save(write, self.samples, self._metrics, tidy=tidy)
        self._saved_extras = extras
