"""What ``ctx.loop`` is given: a dataset and its settings, or a DataLoader, which has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from parsl_freetrain.core.model.errors import BadInput


@dataclass(frozen=True)
class LoaderData:
    """A dataset, and how it is read."""

    dataset: Any
    batch_size: int
    shuffle: bool
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int

    @staticmethod
    def of_loop(
        data: Any,
        batch_size: int | None,
        shuffle: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: int,
    ) -> LoaderData:
        """Of the arguments of ``ctx.loop``: a dataset, or a DataLoader in its place.

        A DataLoader of a stream with ``batch_size=None`` gives samples, so it is a stream itself.

        Raises
        ------
        BadInput
            If there is no batch size or there are two, or the DataLoader does something that
            ``ctx.loop`` does not.
        """
        is_loader = isinstance(data, DataLoader)
        if not is_loader or (isinstance(data.dataset, IterableDataset) and data.batch_size is None):
            if batch_size is None:
                raise BadInput(
                    f'ctx.loop was given a {type(data).__name__} without a batch size: say '
                    'ctx.loop(dataset, batch_size).'
                )
            return LoaderData(data, batch_size, shuffle, collate_fn, num_workers)
        if batch_size is not None or not shuffle or collate_fn is not None or num_workers:
            raise BadInput(
                f'ctx.loop was given a {type(data).__name__} and settings such as batch_size: it '
                'has settings of its own, so leave these out, or give ctx.loop its dataset.'
            )
        if isinstance(data.dataset, IterableDataset):
            if data.num_workers:
                raise BadInput(
                    'ctx.loop was given a DataLoader of a stream with num_workers='
                    f'{data.num_workers}: leave out num_workers, or say ctx.loop(DataLoader('
                    'stream, batch_size=None, num_workers=...), batch_size).'
                )
            return LoaderData(data.dataset, data.batch_size, False, data.collate_fn, 0)
        found = LoaderData.of(data, 'ctx.loop')
        assert found is not None
        return found

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
        # torchdata's samplers have these names too.
        known = {RandomSampler.__name__, SequentialSampler.__name__}
        if loader.batch_size is None or sampler.__name__ not in known:
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
