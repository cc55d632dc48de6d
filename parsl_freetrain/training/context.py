"""What the user's function gets as its first argument."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import tee
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.words import Shape
from parsl_freetrain.training import lr
from parsl_freetrain.training.agreement import GO_ON, SAVE, SPOILT, STOP
from parsl_freetrain.training.channel import Channel
from parsl_freetrain.training.data import Turn, make_loader, seed_everything, size_of, to_device
from parsl_freetrain.training.division import Division
from parsl_freetrain.training.fragment import REPRODUCIBLE, SCALED, FragmentOrder, RankPlace
from parsl_freetrain.training.inbox import Inbox
from parsl_freetrain.training.keeper import Keeper
from parsl_freetrain.training.modes import Steps, make_steps
from parsl_freetrain.training.nonfinite import Watch
from parsl_freetrain.training.peers import Peers
from parsl_freetrain.training.policies import ROLLBACK, Policy
from parsl_freetrain.training.prepared import Prepared, check_schedulers, sort_out
from parsl_freetrain.training.sampling import GlobalOrder, samples_in
from parsl_freetrain.training.state import Position, Saved, State, check_position, collect, content_of, read_state, restore

PROGRESS_EVERY_S = 0.5


class FragmentEnd(BaseException):
    """Leaves the user's function when the fragment ends before the total is reached; the state is saved."""


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
    stopped
        Whether the fragment ended before the total.
    state
        The user's own dict, saved in every checkpoint (rank 0's counts); what JSON can hold.
    """

    def __init__(self, order: FragmentOrder, place: RankPlace, peers: Peers, channel: Channel, inbox: Inbox, keeper: Keeper,
                 device: torch.device, saved: Saved | None) -> None:
        self._order, self._peers, self._channel, self._inbox, self._keeper, self._saved = order, peers, channel, inbox, keeper, saved
        self.trainer, self.fragment = order.trainer, order.fragment
        self.rank, self.world_size, self.local_rank, self.nodes = place.rank, place.world_size, place.local_rank, place.nodes
        self.device = device
        self._division = Division(order, place, device)
        self.samples = saved.position.samples if saved is not None else 0
        self.total_samples = order.total_samples
        if saved is not None and self.total_samples is None:
            self.total_samples = saved.position.total_samples
        self.epoch = 0
        self.last_of_epoch = False
        self.state: dict[str, Any] = dict(saved.position.user) if saved is not None else {}
        self._metrics: dict[str, float] = dict(keeper.last.metrics) if keeper.last is not None else {}
        self._saved_extras = self._extras()
        self._resumed = saved is not None
        self._prepared = Prepared()
        self._steps: Steps | None = None
        self._watch = Watch(self._prepared)
        self._policy = Policy(order.on_nan, f'Trainer {order.trainer!r}, fragment {order.fragment}')
        self._fine_at = self._reached = self.samples
        self._went_back = 0
        self._position: Position | None = None
        self._complete = self.stopped = False
        self._told_at = 0.0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that writes."""
        return self.rank == 0

    @property
    def shape(self) -> Shape:
        """How the ranks of this fragment share the work; where the trainer has no ``shapes``, every rank trains samples of its own."""
        return self._division.shape

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks as torch's DeviceMesh with dimensions :data:`~parsl_freetrain.core.words.MESH`; ranks count along the last one first.

        It and its process groups are made when they are first asked for, which all ranks must do at the same point of the function.
        """
        return self._division.mesh

    def time_left(self) -> float:
        """Seconds until the nodes go; infinite where unknown."""
        return self._keeper.time_left()

    def should_stop(self) -> bool:
        """Whether this rank knows of a reason to stop; the loop stops by itself, so only long work outside of it needs to ask."""
        return self._inbox.stop_requested() or self._keeper.must_stop(1)

    def samples_lr(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]) -> torch.optim.lr_scheduler.LambdaLR:
        """A learning rate scheduler that goes by samples, not by steps, so that it is the same for any number of nodes.

        Parameters
        ----------
        optimizer
            Before it is prepared.
        factor
            Takes the samples seen by all ranks in all fragments before a batch, and gives what the optimizer's initial learning rate is
            multiplied by in that batch.

        Returns
        -------
        torch.optim.lr_scheduler.LambdaLR
            Give it to :meth:`prepare`, and call its ``step()`` once in each turn, behind the optimizer's.
        """
        return lr.by_samples(optimizer, factor, lambda: self._reached)

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
            All models (of which the parameters are trained), optimizers, learning rate schedulers and gradient scalers.
        clip_grad_norm
            Clip the gradient of the global batch to this norm.
        find_unused_parameters
            As DDP has it; not in reproducible mode.

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
        self._prepared = sort_out(things, named=self._division.stated)
        for model in self._prepared.models:
            model.to(self.device)
        if self._saved is not None:
            restore(self._prepared, self._saved, parts=self._division.pipelined)
        else:
            self._division.make_equal((tensor.data for tensor in self._prepared.tensors()), self._peers)
        self._watch = Watch(self._prepared)
        if self._order.mode == SCALED:
            lr.scale_steps(self._prepared.optimizers, lambda: self._order.scaled.lr_factor(self.world_size, self.samples))
        steps = make_steps(self._order, self._prepared, self._peers, self._division, clip_grad_norm, find_unused_parameters, self.device)
        self._steps = steps
        self._keeper.expect(3 * sum(tensor.nbytes for tensor in self._prepared.tensors()),
                            self._saved.position.checkpoint_s if self._saved is not None else 0.0)
        of = {id(thing): stand_in for kind in ('models', 'optimizers', 'schedulers')
              for thing, stand_in in zip(getattr(self._prepared, kind), getattr(steps, kind), strict=True)}
        of.update((id(scaler), scaler) for scaler in self._prepared.scalers)
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
            Samples of a global batch, over all ranks: what one optimizer step sees. In scaled mode that of the reference number of ranks.
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
        scaled = self._order.mode == SCALED
        data_order = GlobalOrder(
            dataset_size=size, batch_size=self._order.scaled.batch_size(batch_size, self.world_size) if scaled else batch_size,
            seed=self._order.seed, shuffle=shuffle, total_samples=self.total_samples, aligned=not scaled)
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
        changed = self.is_main and self._extras() != self._saved_extras
        if self._division.pipelined:
            changed = bool(self._peers.largest((changed,))()[0])
        if changed:
            self._keeper.save_now(self._to_save, self.samples, self._metrics)

    def outcome(self, how: str, error: dict[str, Any] | None) -> dict[str, Any]:
        """The last message of a rank."""
        last = self._keeper.settled()
        return {'kind': 'outcome', 'how': how, 'samples': self.samples, 'path': last.path if last is not None else None,
                'metrics': dict(self._metrics), 'error': error, **self._keeper.last_words()}

    def _turns(self, steps: Steps, data_order: GlobalOrder, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None,
               num_workers: int) -> Iterator[Any]:
        if self._policy.policy == ROLLBACK and not self._resumed:
            self._keeper.save_now(self._to_save, self.samples, self._metrics)   # so that there is something to go back to
        began_with = self.samples
        while True:
            yield from self._until_total(steps, data_order, dataset, collate_fn, num_workers)
            if self.samples == self.total_samples and not self._must_go_back():
                break
            self._go_back(steps)
        if self.samples > began_with:
            self._keeper.save_now(self._to_save, self.samples, self._metrics)
        self._complete = True

    def _until_total(self, steps: Steps, data_order: GlobalOrder, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None,
                     num_workers: int) -> Iterator[Any]:
        """Turns from here to the total; ends before it where training must go back."""
        seed, began_with, began_at = self._order.seed, self.samples, time.monotonic()
        reproducible = self._order.mode == REPRODUCIBLE
        if not reproducible:
            seed_everything(Turn((), self.samples, self._division.data_rank, 0.0).seed(seed, 'fragment'))
        ahead, here = tee((batch, steps.turns(batch)) for batch in data_order.batches(self.samples))
        # Ranks that train the same samples must also draw the same for them.
        drawn = seed if reproducible or self._division.grouped else None
        micro_batches = iter(make_loader(dataset, (turn for _, turns in ahead for turn in turns), drawn, collate_fn, num_workers))
        for batch, turns in here:
            batch_began_at = time.monotonic()
            self._reached = batch.samples_before + len(batch.indices)
            self.epoch = batch.epoch
            self.last_of_epoch = self._reached % data_order.dataset_size == 0
            guarded = self._policy.looks_at_every_step(self.samples)
            steps.begin(batch, guarded)
            if self.samples == began_with:
                self._channel.send({'kind': 'started', 'samples': self.samples, 'at': time.time()})
            for turn in turns:
                data = to_device(next(micro_batches), self.device)
                steps.begin_turn(turn)
                if reproducible:
                    seed_everything(turn.seed(seed, 'model'))
                yield data
                steps.end_turn()
            decision = steps.end(self._wish, self.time_left)
            if steps.kept_back:
                self._policy.kept_back(self.samples, self._reached, steps.culprit())
                self._count('skipped_steps')
            elif guarded or reproducible:
                self._policy.went_well()
            self.samples = self._reached
            now = time.monotonic()
            self._keeper.step_took(now - batch_began_at)
            self._tell_progress((self.samples - began_with) / (now - began_at))
            if self.samples == self.total_samples or decision == SPOILT or (decision != GO_ON and self._must_go_back()):
                return
            if decision == SAVE:
                self._keeper.save_beside(self._to_save, self.samples, self._metrics)
            elif decision == STOP:
                self._keeper.save_and_stop(self._to_save, self.samples, self._metrics)
                self.stopped = True
                raise FragmentEnd

    def _must_go_back(self) -> bool:
        """Whether some rank's state is spoilt; all of them look, so that all can say whose gradient it was."""
        looks = self._policy.policy == ROLLBACK or self._order.mode != REPRODUCIBLE   # otherwise each step is looked at
        return looks and bool(self._peers.largest((self._watch.spoilt(),))()[0])

    def _go_back(self, steps: Steps) -> None:
        """Go back to the last checkpoint, all ranks alike."""
        self._went_back += 1

        def what() -> str:
            last = self._keeper.settled()
            return json.dumps([last.path if last is not None else '', self._metrics.get('rollbacks', 0)])
        path, before = json.loads(self._peers.tell(f'back-{self._went_back}', what))
        self._policy.go_back(self._fine_at, self.samples, int(before), path, steps.culprit())
        print(f'Going back from {self.samples} samples to checkpoint {path}: numbers were not finite')
        saved = read_state(path)
        restore(self._prepared, saved, parts=self._division.pipelined)
        self.state.clear()
        self.state.update(saved.position.user)
        self.samples = self._fine_at = self._reached = saved.position.samples
        self._metrics['rollbacks'] = before
        self._count('rollbacks')
        self._keeper.went_back()

    def _count(self, what: str) -> None:
        self._metrics[what] = self._metrics.get(what, 0.0) + 1

    def _wish(self) -> int:
        assert self._steps is not None
        if self._order.mode != REPRODUCIBLE and self._watch.due():
            if self._watch.spoilt():
                return SPOILT
            self._fine_at = self.samples
        if self._inbox.stop_requested():
            return STOP
        if not self.is_main:
            return GO_ON
        if self._keeper.must_stop(1 + self._steps.delay):
            return STOP
        return SAVE if self._keeper.wants_to_save() else GO_ON

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

    def _to_save(self) -> State | None:
        """All ranks' state, at the one that writes it; those that have a part of it ask together."""
        if not self._division.saves:
            return None
        assert self._position is not None
        if self._watch.spoilt():
            raise BadInput(self._policy.sentence(self._fine_at, self.samples))
        extras = self._extras() if self.is_main else ''
        content = self._division.join(content_of(self._prepared, named=self._division.stated))
        if not self.is_main:
            return None
        self._saved_extras = extras
        return collect(content, Position(**{
            **vars(self._position), 'samples': self.samples, 'checkpoint_s': self._keeper.longest_s, 'user': self.state}))
