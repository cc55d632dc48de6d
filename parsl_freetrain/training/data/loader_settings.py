"""What ``ctx.loop`` is given: a dataset and its settings, or a DataLoader, which has them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.data.sample_order import epoch_size
from parsl_freetrain.training.data.sampler import Sampler

KNOWN = {'RandomSampler', 'SequentialSampler', 'SeedableRandomSampler'}
"""Samplers in whose place ``ctx.loop`` has an order of its own; torchdata's have these names too,
and the last one is accelerate's.
"""


@dataclass(frozen=True)
class LoaderSettings:
    shuffle: bool = True
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    sampler: Sampler | None = None
    drop_last: bool = False
    worker_init_fn: Callable[[int], object] | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderData(LoaderSettings):
    dataset: Any
    batch_size: int

    def in_loop(self, ctx: Any, **options: Any) -> Any:
        how = {name: value for name, value in vars(self).items() if name != 'dataset'}
        return ctx.loop(self.dataset, **how, **options)

    def check_stream(self) -> None:
        """Raises BadInput if a stream cannot be read like this."""
        if self.num_workers:
            raise BadInput(
                f'ctx.loop was given a stream and num_workers={self.num_workers}; a stream is read '
                'in its own order by one process: leave out num_workers.'
            )
        if self.sampler is not None or self.drop_last:
            raise BadInput(
                'ctx.loop was given a stream, which has its own order and no epochs: leave out '
                'sampler and drop_last.'
            )

    @staticmethod
    def of_loop(data: Any, batch_size: int | None, own: LoaderSettings) -> 'LoaderData':
        """The arguments of ``ctx.loop``; BadInput for none or two batch sizes, or what it lacks."""
        is_loader = isinstance(data, DataLoader)
        if not is_loader or (isinstance(data.dataset, IterableDataset) and data.batch_size is None):
            if batch_size is None:
                raise BadInput(
                    f'ctx.loop was given a {type(data).__name__} without a batch size: say '
                    'ctx.loop(dataset, batch_size).'
                )
            return LoaderData(dataset=data, batch_size=batch_size, **vars(own))
        _refuse_own_way(data)
        if batch_size is not None or own != LoaderSettings():
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
            how = {'batch_size': data.batch_size, 'collate_fn': data.collate_fn}
            return LoaderData(dataset=data.dataset, shuffle=False, **how)
        return LoaderData.read(data, 'given to ctx.loop')

    @staticmethod
    def read(loader: Any, what: str) -> 'LoaderData':
        """Of a map-style dataset. Raises BadInput if it makes batches by itself."""
        batches: Any = loader.batch_sampler
        if getattr(type(batches), '__iter__', None) is not BatchSampler.__iter__:
            raise BadInput(
                f'The DataLoader {what} has a {type(batches).__name__} as its batch sampler; in '
                'fragments batches are made in the order of a sampler: say batch_size and '
                'sampler, of one dataset. Streams go to ctx.loop.'
            )
        own = batches.sampler
        draws = isinstance(own, RandomSampler) and (own.replacement or own._num_samples is not None)
        plain = type(own).__name__ in KNOWN and not draws  # else not all samples, or some twice
        return LoaderData(
            dataset=loader.dataset,
            batch_size=batches.batch_size,
            shuffle=plain and type(batches.sampler).__name__ != 'SequentialSampler',
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            sampler=None if plain else batches.sampler,
            drop_last=batches.drop_last,
            worker_init_fn=loader.worker_init_fn,
        )

    def in_epoch(self, accumulate: int) -> tuple[int, int]:
        """How many samples an epoch has, and one step of it."""
        size = len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        batch = self.batch_size * accumulate
        return epoch_size(size, batch, self.drop_last), batch

    def check_evaluation(self, what: str) -> None:
        """Raises BadInput if it does not take each sample once, as ``ctx.evaluate`` does."""
        if self.sampler is not None or self.drop_last or self.worker_init_fn:
            raise BadInput(
                f'The DataLoader {what} has drop_last, worker_init_fn or a sampler of its own; an '
                'evaluation takes each sample once: leave these out.'
            )

    @staticmethod
    def of(loader: Any, what: str) -> 'LoaderData':
        """A DataLoader or what returns one. Raises BadInput as :meth:`of_loop`."""
        if callable(loader):
            loader = loader()
        if isinstance(loader, (list, tuple)) and len(loader) < 2:
            loader = loader[0] if loader else None
        if not isinstance(loader, DataLoader):
            raise BadInput(
                f'The data of {what} are a {type(loader).__name__}; in fragments it is one '
                'DataLoader.'
            )
        _refuse_own_way(loader)
        if isinstance(loader.dataset, IterableDataset):
            raise BadInput(f'The data of {what} are a stream: give it to ctx.loop yourself.')
        return LoaderData.read(loader, f'of {what}')


def _refuse_own_way(loader: DataLoader[Any]) -> None:
    """Raises BadInput if a DataLoader makes or changes batches by itself."""
    for name in ('__iter__', '_get_iterator'):
        of = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if of is not DataLoader and not of.__module__.startswith('torchdata.'):
            raise BadInput(
                f'ctx.loop was given a {type(loader).__name__}, a DataLoader with a {name} of its '
                f'own ({of.__module__}.{of.__qualname__}), which cannot begin in the middle of an '
                'epoch: give ctx.loop the dataset, and let a collate_fn or the body of the loop do '
                f'what this {name} does.'
            )
