"""torch's DataLoader in our order, with random numbers that depend only on the position in it."""

import copy
import dataclasses
import random
import signal
import time
from array import array
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, Sized
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch._C import _error_if_any_worker_fails
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.device_faults import causes
from parsl_freetrain.training.comm.inbox import STOP_SIGNALS
from parsl_freetrain.training.data.loader_settings import LoaderSettings
from parsl_freetrain.training.data.own_generators import own_generators, seed_of
from parsl_freetrain.training.process.linux import die_with_parent

_WORKER = 'DataLoader worker (pid'  # torch's words
_DIES_S = 0.3


@dataclass(frozen=True)
class MicroBatch:
    """What this rank trains in one forward and backward pass, an iteration of the user's loop."""

    indices: tuple[int, ...]  # into the dataset
    samples_before: int  # the global batch
    part: int  # of the global batch: the virtual shard, or the rank
    weight: float  # of its gradient in that of the global batch, 0 to 1
    number: int = 0  # among the micro-batches of this part
    share: float | None = None  # of its gradient in the sum, if that is not the weight

    def seed(self, seed: int, what: str) -> int:
        """63 bits, for this micro-batch and this use only."""
        part = f'{self.part}.{self.number}' if self.number else str(self.part)
        return seed_of(f'{seed}:{self.samples_before}:{part}:{what}')


def seed_alike(samples: int, seed: int, what: str) -> None:
    """Seed all ranks alike, for what they do together after a number of samples."""
    seed_everything(MicroBatch((), samples, 0, 0.0).seed(seed, what))


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), ``random``, numpy, and the user's own generators."""
    torch.default_generator.manual_seed(seed)
    # torch.manual_seed also records a stack for each kind of device, as long as a small step.
    for module in (torch.cuda, torch.xpu):
        if module.is_initialized():
            module.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    own_generators.seed(seed)


def make_loader(
    dataset: Any,
    micro_batches: Iterable[MicroBatch],
    seed: int | None,
    read: LoaderSettings,
    device: torch.device,
) -> DataLoader[Any]:
    """The collated samples of each micro-batch, in order, with workers that stay; in page-locked
    memory for a ``device``. With a seed, what the dataset draws at random depends only on the
    micro-batch and not on the worker; without one, as in any DataLoader.
    """
    own_generators.find({'dataset': dataset, 'collate_fn': read.collate_fn})
    options: dict[str, Any] = {
        'collate_fn': read.collate_fn and _Collate(read.collate_fn),
        'num_workers': read.num_workers,
        'worker_init_fn': partial(_begin_worker, read.worker_init_fn),
        'pin_memory': device.type != 'cpu',
        'persistent_workers': read.num_workers > 0,
    }
    plain = type(dataset) is TensorDataset and all(
        type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_contiguous()
        for tensor in dataset.tensors
    )
    if read.collate_fn is None and plain:
        dataset, options['collate_fn'] = _Rows(dataset), list
    batches: Any = micro_batches
    by_batch = _OfMicroBatches(dataset, read.collate_fn, seed)
    return DataLoader(by_batch, batch_sampler=batches, **options)


def size_of(dataset: Any) -> int:
    indexed = isinstance(dataset, Sized) and hasattr(dataset, '__getitem__')
    if isinstance(dataset, IterableDataset) or not indexed:
        raise BadInput(
            f'ctx.loop was given a {type(dataset).__name__}; it needs a dataset with a length and '
            'an index (a map-style torch Dataset, a list), so that training can be resumed '
            'anywhere.'
        )
    return len(dataset)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch's tensors on the device, in containers of its classes; ``to`` moves what has it."""
    if device.type == 'cpu':
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(type(batch), 'to', None)):
        return batch.to(device)
    if isinstance(batch, tuple):
        moved = (to_device(value, device) for value in batch)
        return type(batch)(*moved) if hasattr(batch, '_fields') else type(batch)(moved)
    if isinstance(batch, (MutableMapping, MutableSequence)):
        found = copy.copy(batch)
        for key in list(batch) if isinstance(batch, MutableMapping) else range(len(batch)):
            found[key] = to_device(batch[key], device)
        return found
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made: Any = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(made, field.name, to_device(getattr(batch, field.name), device))
        return made
    return batch


def with_own_workers(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A user's DataLoader whose workers end with the rank, and not by its stop signals."""
    loader.worker_init_fn = partial(_begin_worker, loader.worker_init_fn)
    return loader


class _Rows(Dataset[Any]):
    """The samples of a TensorDataset, collated: to stack them one by one takes most of a step."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._tensors = dataset.tensors

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        at = torch.frombuffer(array('q', indices), dtype=torch.int64)  # torch.tensor takes long
        return [tensor[at] for tensor in self._tensors]


class _Collate:
    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, items: list[Any]) -> Any:
        try:
            return self._function(items)
        except Exception as error:
            raise BadInput(
                f'collate_fn raised {type(error).__name__} ({error}) for {len(items)} samples. '
                'Each part of a global batch (a virtual shard, a rank, a micro-batch) is collated '
                'by itself, so it must take few samples: if it leaves some out, leave them out by '
                'a sampler or in the dataset.'
            ) from error


class _OfMicroBatches(Dataset[Any]):
    def __init__(self, dataset: Any, collate_fn: Any, seed: int | None) -> None:
        self._dataset, self._collate_fn, self._seed = dataset, collate_fn, seed
        self._looked = seed is None  # in this process

    def __getitems__(self, micro_batch: MicroBatch) -> list[Any]:
        items = self._items(micro_batch)
        if not self._looked:
            self._looked = True
            # Some are made with the first sample, or by an object that collates it, in each worker.
            collate = self._collate_fn
            tried = collate is not None and not isinstance(collate, FunctionType)
            if tried:
                collate(items)
            if own_generators.find({'dataset': self._dataset, 'collate_fn': collate}) or tried:
                items = self._items(micro_batch)
        return items

    def _items(self, micro_batch: MicroBatch) -> list[Any]:
        if self._seed is not None and not isinstance(self._dataset, _Rows):  # which draws nothing
            seed_everything(micro_batch.seed(self._seed, 'data'))
        indices, together = list(micro_batch.indices), getattr(self._dataset, '__getitems__', None)
        return list(together(indices)) if together else [self._dataset[i] for i in indices]


def worker_died(error: BaseException) -> str:
    """What torch says if an exception means that a worker died; empty if not."""
    found = [str(cause).strip() for cause in causes(error) if _WORKER in str(cause)]
    if found:
        return next((text for text in found if 'killed by signal' in text), found[0])
    if not any(isinstance(cause, (OSError, EOFError)) for cause in causes(error)):
        return ''
    # Its connections may end before it has ended.
    until = time.monotonic() + _DIES_S
    while time.monotonic() < until:
        try:
            _error_if_any_worker_fails()
        except RuntimeError as said:
            return str(said).strip()
        time.sleep(0.01)
    return ''


def _begin_worker(then: Callable[[int], object] | None, number: int) -> None:
    # A worker is forked from the rank, and must not outlive it. A scheduler sends its notice to all
    # processes of a node. The rank stops for it, and needs the worker's samples until then. Not
    # ignored, as what the worker starts would then ignore it too. Where it is no rank, in a
    # debugger, the signals keep their meaning.
    if callable(signal.getsignal(signal.SIGTERM)):
        for stop in STOP_SIGNALS:
            signal.signal(stop, lambda *_: None)  # the rank has got it as well
            signal.siginterrupt(stop, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if (info := get_worker_info()) is not None:
        own_generators.find({'dataset': info.dataset})
    own_generators.seed(torch.initial_seed())
    if then is not None:
        then(number)
