"""What ``ctx.loop`` needs to know of a DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from parsl_freetrain.core.model.errors import BadInput


@dataclass(frozen=True)
class LoaderData:
    """The data of a DataLoader, and how it reads them."""

    dataset: Any
    batch_size: int
    shuffle: bool
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int

    @staticmethod
    def of(loader: Any, what: str) -> LoaderData | None:
        """Of a DataLoader, or of a function that returns one; None of None.

        Raises
        ------
        BadInput
            If it does something that ``ctx.loop`` does not.
        """
        if callable(loader):
            loader = loader()
        if loader is None or (isinstance(loader, (list, tuple)) and not loader):
            return None
        if not isinstance(loader, DataLoader):
            raise BadInput(
                f'The data of {what} are a {type(loader).__name__}; in fragments it is one '
                'DataLoader.'
            )
        if isinstance(loader.dataset, IterableDataset):
            raise BadInput(f'The data of {what} are a stream: give it to ctx.loop yourself.')
        sampler = type(loader.sampler)
        if loader.batch_size is None or sampler not in (RandomSampler, SequentialSampler):
            raise BadInput(
                f'The DataLoader of {what} has a {sampler.__name__} or a batch sampler of its own; '
                'in fragments the order is that of ctx.loop: say batch_size and shuffle.'
            )
        drawn = loader.sampler if isinstance(loader.sampler, RandomSampler) else None
        if drawn is not None and (drawn.replacement or drawn._num_samples is not None):
            raise BadInput(
                f'The DataLoader of {what} draws with replacement, or not all samples; ctx.loop '
                'trains each sample once in an epoch.'
            )
        for name in ('drop_last', 'worker_init_fn'):
            if getattr(loader, name):
                raise BadInput(
                    f'The DataLoader of {what} has {name}, which ctx.loop does not support.'
                )
        return LoaderData(
            loader.dataset,
            loader.batch_size,
            drawn is not None,
            loader.collate_fn,
            loader.num_workers,
        )
