"""What one call of ``ctx.loop`` trains: which samples, in which order, from where to where."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee
from threading import Thread
from typing import Any

import msgspec
import torch
from torch.utils.data import Dataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.state import Position, Source
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.data import sample_order
from parsl_freetrain.training.data.inside import Looks, different, fingerprint, inside, looks_of
from parsl_freetrain.training.data.loader import MicroBatch, make_loader, size_of
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.data.sampler import SampledOrder, order_name, sampled_order
from parsl_freetrain.training.data.stream import ENDLESS, NumberedStream, is_stream
from parsl_freetrain.training.data.together import Together
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.loss import Loss
from parsl_freetrain.training.spec.fragment_order import Rehearsed
from parsl_freetrain.training.spec.mode import Scaled
from parsl_freetrain.training.spec.training import TrainingSpec

_SPLIT = (
    'Split and shuffle with a fixed seed, such as numpy.random.default_rng(0), and sort what comes '
    'from a set or a folder.'
)


@dataclass(frozen=True)
class LoopCall:
    """What one call of ``ctx.loop`` was given."""

    data: LoaderData
    micro_batch: int | None
    epochs: float | None
    samples: int | None
    loss: Loss | None


@dataclass(frozen=True)
class LoopSpan:
    """A loop's number, from 1, the samples before it, its own, and of all, if known."""

    number: int
    base: int
    length: int
    total: int


class LoopLengths:
    """Divides a trainer's total among the loops of its function, in the order of their calls."""

    def __init__(self, spec: TrainingSpec) -> None:
        self._spec = spec
        self._epochs_before = 0.0
        self.loops = self._end = 0

    def next(self, position: Position | None, now: int, in_epoch: int, call: LoopCall) -> LoopSpan:
        """The next loop, of which an epoch has ``in_epoch`` samples, when ``now`` samples are
        trained. Without epochs and samples it trains the rest. Raises BadInput for both, for
        samples of a total in epochs, or if not so much is left.
        """
        in_epochs = call.epochs is not None or self._spec.total_epochs is not None
        if in_epochs and is_stream(call.data.dataset):
            raise BadInput(
                'ctx.loop was given a stream, which has no epochs: state how much to train in '
                'samples (total_samples of the trainer, and samples of ctx.loop).'
            )
        self.loops += 1
        base = self._end
        if position is None or self.loops == position.loop:
            base = now if position is None else position.base
        length, total = self._length(base, in_epoch, call.epochs, call.samples)
        self._end = base + length
        return LoopSpan(self.loops, base, length, total)

    def _length(
        self, base: int, in_epoch: int, epochs: float | None, samples: int | None
    ) -> tuple[int, int]:
        spec = self._spec
        if epochs is not None and samples is not None:
            raise BadInput('ctx.loop was given epochs and samples: give one of them.')
        if spec.total_epochs is None:
            assert spec.total_samples is not None
            total = spec.total_samples
            own = sample_order.samples_in(epochs, in_epoch) if epochs is not None else samples
        else:
            if samples is not None:
                raise BadInput(
                    'ctx.loop was given samples, but the total of the trainer is in epochs: '
                    'say epochs=..., or state the total in samples.'
                )
            left = spec.total_epochs - self._epochs_before
            if epochs is not None and epochs > left:
                raise BadInput(
                    f'ctx.loop was given {epochs:g} epochs, but only {left:g} of the total of '
                    f'{spec.total_epochs:g} are left.'
                )
            total = base + sample_order.samples_in(left, in_epoch) if left else base
            own = sample_order.samples_in(epochs, in_epoch) if epochs is not None else None
            self._epochs_before += left if epochs is None else epochs
        length = total - base if own is None else own
        if not 0 < length <= total - base:
            raise BadInput(
                f'ctx.loop was to train {length} samples, but {total - base} of the total of '
                f'{total} are left: a call goes over all epochs, unless it states its own.'
            )
        return length, total


class LoopData:
    """The samples of a loop: a dataset and how it is read, or a stream; ``in_epoch`` in an epoch.
    Raises BadInput for no length, or an order that differs among ranks. A rehearsal cuts an epoch
    short.
    """

    def __init__(
        self,
        read: LoaderData,
        seed: int,
        peers: Peers,
        epoch: int = 0,
        rehearsed: Rehearsed | None = None,
    ) -> None:
        self.read, self._seed, self._peers = read, seed, peers
        _refuse_threads(read.dataset)
        self.looks: Looks = {}
        self.dataset, self._size = read.dataset, ENDLESS
        self._stream: NumberedStream | None = None
        if is_stream(read.dataset):
            read.check_stream()
            self.dataset = self._stream = NumberedStream(read.dataset, seed)
        else:
            self._size = size_of(read.dataset)
        if isinstance(read.dataset, Together):
            read.dataset.begin(seed, peers)
        self._chosen: SampledOrder | None = sampled_order(
            read.sampler, self._size, seed, peers, epoch
        )
        self._ordered = self._chosen.size if self._chosen is not None else self._size
        if rehearsed is not None and self._chosen is None and self._stream is None:
            self._ordered = min(self._size, rehearsed.epoch_steps * read.batch_size)
        self._shuffle = read.shuffle and self._stream is None
        self.in_epoch = sample_order.epoch_size(self._ordered, read.batch_size, read.drop_last)
        self.order_at = partial(
            order_name, self._chosen, self._shuffle, read.drop_last, self.in_epoch
        )

    def check_same(self, saved: Source | None) -> None:
        """All ranks; BadInput if the dataset differs among them, or from the checkpoint's."""
        if self._stream is not None:
            return
        self.looks.update(looks_of(self.read.dataset))
        said = gather_bytes(self._peers, msgspec.json.encode(self.looks))
        others = [msgspec.json.decode(one, type=Looks) for one in said]
        for rank, other in enumerate(others):
            if where := different(others[0], other):
                raise BadInput(
                    'The dataset given to ctx.loop is not the same on all ranks, so samples would '
                    f'be lost and others trained twice: {where}, on ranks 0 and {rank}. {_SPLIT}'
                )
        there = saved.position if saved is not None else None
        within = (
            there is not None
            and (there.samples - there.base) % self.in_epoch
            and there.dataset_size == self._size  # otherwise the length is what is refused
        )
        if saved and within and (where := different(saved.position.looks, self.looks)):
            raise BadInput(
                f'The dataset given to ctx.loop has changed since checkpoint {saved.path}, so '
                f'samples would be lost and others trained twice: {where}. {_SPLIT}'
            )

    def position(self, samples: int, span: LoopSpan, shards: int, saved: Source | None) -> Position:
        if self._stream is not None and saved is not None:
            self._stream.marks.update(saved.position.marks)
        return Position(
            samples,
            span.total,
            self._seed,
            self._size,
            self.read.batch_size,
            shards,
            loop=span.number,
            base=span.base,
            marks=self._stream.marks if self._stream is not None else {},
            order=self.order_at(samples - span.base),
            looks=self.looks,
        )

    def batches(self, samples: int, span: LoopSpan, spec: TrainingSpec) -> 'BatchSource':
        """What is trained from there on, on all ranks; BadInput for unlike streams."""
        if self._stream is not None and samples < span.base + span.length:
            self._stream.check_same(samples - span.base, self._peers)
        mode, batch_size = spec.mode, self.read.batch_size
        if isinstance(mode, Scaled):
            batch_size = mode.batch_size(batch_size, self._peers.world_size)
        order = sample_order.GlobalOrder(
            dataset_size=self._ordered,
            batch_size=batch_size,
            seed=mode.seed,
            shuffle=self._shuffle,
            total_samples=span.length,
            aligned=not isinstance(mode, Scaled),
            sampler=self._chosen,
            drop_last=self.read.drop_last,
        )
        diloco, length = spec.diloco, 0
        if diloco is not None:
            most = spec.max_nodes * (spec.ranks.per_node or 1)
            length = diloco.round_samples(batch_size, span.total, self.in_epoch, most)
        replicas = diloco.replicas if diloco is not None else 1
        rounds = spec.replica, replicas, length
        return BatchSource(order, self.dataset, self.read, span.base, self.looks, *rounds)


def _refuse_threads(dataset: Any) -> None:
    """Raises BadInput for a dataset that replaces its samples beside training."""
    for path, one in inside({'the dataset': dataset}):
        for name, value in vars(one).items() if isinstance(one, Dataset) else ():
            if isinstance(value, Thread) and value.is_alive():
                raise BadInput(
                    f'A {type(one).__name__}, {path} given to ctx.loop, has a thread of its own '
                    f'({name}): the samples that it has replaced when a fragment ends would be '
                    'lost, so the next one would train others. Use a dataset that stays as it is '
                    '(in MONAI CacheDataset or PersistentDataset).'
                )


Batch = tuple[sample_order.GlobalBatch, Sequence[MicroBatch], Iterator[Any]]
"""A global batch, this rank's micro-batches of it, and what loads these in order."""


class _Restarted:
    """The micro-batches of global batches, for a loader that is iterated over once per epoch."""

    items: Iterator[tuple[sample_order.GlobalBatch, Sequence[MicroBatch]]] = iter(())

    def __iter__(self) -> Iterator[MicroBatch]:
        return (micro_batch for _, micro_batches in self.items for micro_batch in micro_batches)


@dataclass(frozen=True)
class BatchSource:
    """A loop's batches, after ``base`` samples of earlier ones; of a replica, by rounds."""

    order: sample_order.GlobalOrder
    dataset: Any
    read: LoaderData
    base: int
    looks: Looks
    replica: int = 0
    replicas: int = 1
    round_samples: int = 0

    @property
    def end(self) -> int:
        return self.base + self.order.total_samples

    def batches(
        self, samples: int, *, of_epoch: bool = False
    ) -> Iterator[sample_order.GlobalBatch]:
        done = samples - self.base
        size = self.order.epoch_size
        left = min(size - done % size, self.order.total_samples - done)
        count = -(-left // self.order.batch_size) if of_epoch else None
        # What comes later is not even asked for: it may depend on the end of the epoch.
        for batch in islice(self.order.batches(done), count):
            indices: Any = batch.indices
            if isinstance(self.dataset, Together):
                indices = self.dataset.indices(indices, batch.samples_before)
            before = self.base + batch.samples_before
            own = indices[self.replica :: self.replicas] if self.replicas > 1 else indices
            yield replace(batch, samples_before=before, indices=own, others=len(indices) - len(own))

    def loaded(
        self,
        state: LoopState,
        divide: Callable[[sample_order.GlobalBatch], Sequence[MicroBatch]],
        at_epochs: bool,
        seed: int | None,
        device: torch.device,
    ) -> Iterator[Batch]:
        """From where training is to the end; ``divide``: into micro-batches; ``at_epochs``: data
        may be changed there.
        """
        # Workers load ahead: not over an end of an epoch at which the data may be changed.
        of_epoch = bool(self.read.num_workers) and (at_epochs or self.read.sampler is not None)
        ahead, loader, before = _Restarted(), None, b''
        while state.samples < self.end:
            batches = self.batches(state.samples, of_epoch=of_epoch)
            ahead.items, here = tee((batch, divide(batch)) for batch in batches)
            own = {'dataset': self.dataset, 'collate_fn': self.read.collate_fn}
            now = fingerprint(**own) if of_epoch else b''  # of what workers have a copy of
            if loader is None or now != before:
                loader = make_loader(self.dataset, ahead, seed, self.read, device)
                before = now
            its = iter(loader)
            for batch, micro_batches in here:
                yield batch, micro_batches, its

    def look(self) -> None:
        """Look at the dataset again, after an end of an epoch that may have changed it."""
        if self.looks:
            self.looks.update(looks_of(self.read.dataset))

    def round_ended(self, samples: int) -> int:
        """The number of the round that ends there, from 1; 0: none does."""
        rounds, left = divmod(samples, self.round_samples) if self.round_samples else (0, 1)
        return 0 if left else rounds

    def epochs_before(self, samples: int) -> int:
        return (samples - self.base) // self.order.epoch_size

    def ends_epoch(self, samples: int) -> bool:
        return samples > self.base and (samples - self.base) % self.order.epoch_size == 0
