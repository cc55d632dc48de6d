"""The order of the data, by the seed and the samples seen so far, never by the nodes. Each global
batch is divided into *virtual shards* (reproducible mode) or one part per rank (throughput mode).
"""

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.core.model.types import deal


@dataclass(frozen=True)
class GlobalBatch:
    """One training step's samples over all ranks, as indices into the dataset, in order."""

    samples_before: int
    epoch: int  # from 0
    indices: Sequence[int]
    others: int = 0  # samples of it that other replicas train

    @property
    def samples_after(self) -> int:
        return self.samples_before + len(self.indices) + self.others


@dataclass(frozen=True)
class GlobalOrder:
    """Every sample once per epoch, by seed and epoch; BadInput for sizes that do not fit."""

    dataset_size: int  # or what ``sampler`` gives for an epoch
    batch_size: int  # over all ranks
    seed: int
    _: KW_ONLY
    shuffle: bool = True  # each epoch has its own random order; else that of the dataset
    total_samples: int  # over all epochs
    aligned: bool = True
    """Whether batches have always had this size, so that every checkpoint is at the end of one;
    False in scaled mode.
    """
    sampler: Callable[[int], Sequence[int]] | None = None
    """Gives the indices of an epoch in place of ``shuffle``."""
    drop_last: bool = False  # whether an epoch ends with its last full batch; not in scaled mode

    def __post_init__(self) -> None:
        _check('The number of samples of the dataset', self.dataset_size)
        if self.batch_size < 1:
            refuse('The global batch size', self.batch_size, 'at least 1 sample')
        _check('The total to train, in samples,', self.total_samples)
        if self.drop_last and not self.aligned:
            raise BadInput(
                'ctx.loop was given drop_last=True in scaled mode, in which the size of a batch, '
                'and so the samples left out, would depend on the number of nodes: leave it out, '
                'or use another mode.'
            )
        if self.drop_last and self.total_samples % self.batch_size:
            raise BadInput(
                f'The total to train is {self.total_samples} samples, whose last batch of '
                f'{self.batch_size} would be short, and ctx.loop was given drop_last=True: say '
                f'{self.total_samples - self.total_samples % self.batch_size} samples.'
            )

    @property
    def epoch_size(self) -> int:
        return epoch_size(self.dataset_size, self.batch_size, self.drop_last)

    def batches(self, samples_done: int) -> Iterator[GlobalBatch]:
        """From a position to the total, none across epochs; BadInput if none ends there."""
        self._check_position(samples_done)
        return self._batches(samples_done)

    def _batches(self, position: int) -> Iterator[GlobalBatch]:
        while position < self.total_samples:
            epoch, start = divmod(position, self.epoch_size)
            order = self.of_epoch(epoch)
            stop = min(self.epoch_size, start + self.total_samples - position)
            for left in range(start, stop, self.batch_size):
                chosen = order[left : min(left + self.batch_size, stop)]
                yield GlobalBatch(position, epoch, chosen)
                position += len(chosen)

    def of_epoch(self, epoch: int) -> Sequence[int]:
        if self.sampler is not None:
            return self.sampler(epoch)
        if not self.shuffle:
            return range(self.dataset_size)
        # Imported here, so that the submitting process can count samples without loading torch.
        import torch

        from parsl_freetrain.training.data.own_generators import seed_of

        generator = torch.Generator(device='cpu').manual_seed(seed_of(f'{self.seed}:{epoch}'))
        # A user's default device or dtype must not change the order.
        order = torch.randperm(
            self.dataset_size, generator=generator, dtype=torch.int64, device='cpu'
        )
        # An array, since each rank would convert all of a tensor to Python integers.
        return array('q', order.numpy().tobytes())

    def _check_position(self, samples_done: int) -> None:
        if samples_done == self.total_samples:
            return
        epoch, position = divmod(samples_done, self.epoch_size)
        within = 0 <= samples_done <= self.total_samples
        if not within or (self.aligned and position % self.batch_size):
            raise BadInput(
                f'The checkpoint is at {samples_done} samples (sample {position} of epoch '
                f'{epoch}), where no global batch ends for batch size {self.batch_size}, '
                f'{self.dataset_size} samples in the dataset and {self.total_samples} in total: '
                'the length of the dataset, the batch size or the total has changed between '
                'fragments; use the earlier one.'
            )


def shard(indices: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous parts, larger ones first, some empty if there are too few indices."""
    _check('The number of shards of a batch', shards)
    parts = (_part(len(indices), shards, index) for index in range(shards))
    return tuple(tuple(indices[part.start : part.stop]) for part in parts)


def shards_of_rank(shards: int, world_size: int, rank: int, speeds: Sequence[float] = ()) -> range:
    """A rank's contiguous, maybe empty range, by ``speeds`` (empty: alike); or BadInput."""
    _check('The number of shards of a batch', shards)
    _check_rank(world_size, rank)
    if not speeds:
        return _part(shards, world_size, rank)
    counts = deal(shards, speeds)
    return range(sum(counts[:rank]), sum(counts[: rank + 1]))


def split_for_ranks(indices: Sequence[int], world_size: int, rank: int) -> tuple[int, ...]:
    """A rank's part, maybe empty; sizes differ by at most 1. BadInput: there is no such rank."""
    _check_rank(world_size, rank)
    part = _part(len(indices), world_size, rank)
    return tuple(indices[part.start : part.stop])


def samples_in(epochs: float, dataset_size: int) -> int:
    """Rounded, at least 1; BadInput if there are none, or ``epochs`` is not above 0."""
    _check('The number of samples of the dataset', dataset_size)
    if not math.isfinite(epochs) or epochs <= 0:
        refuse('The total to train, in epochs,', epochs, 'a number above 0')
    return max(1, round(epochs * dataset_size))


def epoch_size(dataset_size: int, batch_size: int, drop_last: bool) -> int:
    """Samples trained in an epoch. Raises BadInput if ``drop_last`` leaves none."""
    if not drop_last:
        return dataset_size
    if dataset_size < batch_size:
        raise BadInput(
            f'ctx.loop was given drop_last=True, and an epoch of {dataset_size} samples has no '
            f'full batch of {batch_size}.'
        )
    return dataset_size - dataset_size % batch_size


def _part(size: int, parts: int, index: int) -> range:
    each, larger = divmod(size, parts)
    start = index * each + min(index, larger)
    return range(start, start + each + (index < larger))


def _check(what: str, number: int) -> None:
    if number < 1:
        refuse(what, number, 'at least 1')


def _check_rank(world_size: int, rank: int) -> None:
    if not 0 <= rank < world_size:
        refuse(f'The number of a rank among {world_size}', rank, f'from 0 to {world_size - 1}')
