"""Loading the data: torch's DataLoader in our order, with random numbers that depend only on the
position in that order.
"""

from __future__ import annotations

import hashlib
import random
import signal
import sys
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.inbox import STOP_SIGNALS
from parsl_freetrain.training.process.linux import die_with_parent


@dataclass(frozen=True)
class MicroBatch:
    """The data of one iteration of the user's loop: what this rank trains in one forward and
    backward pass.

    Attributes
    ----------
    indices
        Indices into the dataset.
    samples_before
        Samples seen before the global batch.
    part
        Number of the part of the global batch: the virtual shard, or the rank.
    weight
        Weight of its gradient in that of the global batch, 0 to 1.
    number
        Its number among the micro-batches of this part, from 0.
    """

    indices: tuple[int, ...]
    samples_before: int
    part: int
    weight: float
    number: int = 0

    def seed(self, seed: int, what: str) -> int:
        """A seed (63 bits) for this micro-batch and this use only."""
        part = f'{self.part}.{self.number}' if self.number else str(self.part)
        text = f'{seed}:{self.samples_before}:{part}:{what}'.encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def seed_alike(samples: int, seed: int, what: str) -> None:
    """Seed all ranks alike, for what they do together after a number of samples."""
    seed_everything(MicroBatch((), samples, 0, 0.0).seed(seed, what))


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), ``random``, and numpy where it has been imported."""
    torch.default_generator.manual_seed(seed)
    # torch.manual_seed also records a stack for every kind of device that may be used later, which
    # takes as long as a step of a small model.
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            module.manual_seed_all(seed)
    random.seed(seed)
    numpy = sys.modules.get('numpy')
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def make_loader(
    dataset: Any,
    micro_batches: Iterable[MicroBatch],
    seed: int | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    device: torch.device,
    worker_init_fn: Callable[[int], object] | None = None,
) -> DataLoader[Any]:
    """A DataLoader that yields the collated samples of each micro-batch, in order. If they are to
    go to an accelerator (``device``), they are in page-locked memory, from which copies need not
    wait.

    With a seed, what the dataset draws at random (augmentation) depends only on the micro-batch and
    not on the worker that loads it. Without one (None), it comes from torch's generator, as in any
    DataLoader.
    """
    options: dict[str, Any] = {
        'collate_fn': collate_fn,
        'num_workers': num_workers,
        'worker_init_fn': partial(_begin_worker, worker_init_fn),
        'pin_memory': device.type != 'cpu',
    }
    if collate_fn is None and _has_rows(dataset):
        dataset, options['collate_fn'] = _Rows(dataset), list
    if seed is None:
        return DataLoader(
            dataset,
            batch_sampler=(list(micro_batch.indices) for micro_batch in micro_batches),
            **options,
        )
    return DataLoader(_SeededDataset(dataset, seed), batch_sampler=micro_batches, **options)  # type: ignore[arg-type]


def size_of(dataset: Any) -> int:
    """The dataset's length. Raises BadInput if it has no length or cannot be indexed, so that the
    order could not be resumed.
    """
    if (
        isinstance(dataset, IterableDataset)
        or not isinstance(dataset, Sized)
        or not hasattr(dataset, '__getitem__')
    ):
        raise BadInput(
            f'ctx.loop was given a {type(dataset).__name__}; it needs a dataset with a '
            'length and an index '
            f'(a map-style torch Dataset, a list), so that training can be resumed anywhere.'
        )
    return len(dataset)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device. Containers are rebuilt; anything else stays as it
    is.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, '_fields'):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def with_own_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A user's DataLoader whose workers end with the rank, and not by its stop signals."""
    loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn)
    return loader


def _has_rows(dataset: Any) -> bool:
    """Whether a batch is, bit by bit and in the same layout, a selection of rows of tensors."""
    return type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_contiguous()
        for tensor in dataset.tensors
    )


class _Rows(Dataset[Any]):
    """The samples of a TensorDataset, collated: to take and stack them one by one costs more than
    all else that a step needs beside its passes.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [tensor[indices] for tensor in self._tensors]


class _SeededDataset(Dataset[Any]):
    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, micro_batch: MicroBatch) -> list[Any]:
        seed_everything(micro_batch.seed(self._seed, 'data'))
        indices = list(micro_batch.indices)
        together = getattr(self._dataset, '__getitems__', None)
        return (
            list(together(indices)) if together is not None else [self._dataset[i] for i in indices]
        )


def _begin_worker(then: Callable[[int], object] | None, number: int) -> None:
    # A worker is forked from the rank. The rank handles requests to stop, and the worker must not
    # outlive it.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if then is not None:
        then(number)
