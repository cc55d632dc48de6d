"""Several DataLoaders that are read at once: ``ctx.loop((labelled, unlabelled))``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, default_collate

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.loader_settings import LoaderData
from parsl_freetrain.training.data.sample_order import GlobalOrder
from parsl_freetrain.training.data.sampler import sampled_order
from parsl_freetrain.training.data.stream import ENDLESS, is_stream

Index = tuple[int, tuple[tuple[int, ...], ...]]
"""A sample of the first dataset, and those of each other one that go with it."""


class Together(Dataset[Any]):
    """The first loader's samples count; the others' go along, in orders that begin anew."""

    def __init__(self, loaders: Sequence[LoaderData]) -> None:
        self.first, *self.others = loaders
        for other in self.others:
            if is_stream(other.dataset) or is_stream(self.first.dataset):
                raise BadInput('ctx.loop was given several DataLoaders, and one reads a stream.')
            if other.batch_size < self.first.batch_size:
                raise BadInput(
                    f'ctx.loop was given several DataLoaders, of which the first has batches of '
                    f'{self.first.batch_size} samples and another one of {other.batch_size}: put '
                    'the one with the smallest batches first; it says what an epoch is.'
                )
        self._orders: list[Callable[[int], Sequence[int]]] = []

    @staticmethod
    def of(loaders: Sequence[LoaderData]) -> LoaderData:
        dataset = Together(loaders)
        return replace(dataset.first, dataset=dataset, collate_fn=dataset.collate)

    def begin(self, seed: int, peers: Peers) -> None:
        """Set the orders of the other datasets. All ranks call this."""
        self._orders = []
        for number, other in enumerate(self.others, 1):
            own = seed + (number << 32)
            chosen = sampled_order(other.sampler, len(other.dataset), own, peers)
            order = GlobalOrder(
                chosen.size if chosen else len(other.dataset),
                other.batch_size,
                own,
                shuffle=other.shuffle,
                total_samples=ENDLESS,
                sampler=chosen,
            )
            self._orders.append(lru_cache(maxsize=2)(order.of_epoch))

    def indices(self, first: Sequence[int], before: int) -> list[Index]:
        """What goes with samples of the first dataset, after ``before`` of them."""
        return [(index, self._beside(before + i)) for i, index in enumerate(first)]

    def _beside(self, place: int) -> tuple[tuple[int, ...], ...]:
        found, size = [], self.first.batch_size
        for other, order in zip(self.others, self._orders, strict=True):
            each, length = other.batch_size, len(order(0))
            places = range(place * each // size, (place + 1) * each // size)
            found.append(tuple(order(at // length)[at % length] for at in places))
        return tuple(found)

    def __len__(self) -> int:
        return len(self.first.dataset)

    def __getitem__(self, index: Index) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[Index]) -> list[list[Any]]:
        firsts = [index for index, _ in indices]
        others = zip(*(beside for _, beside in indices), strict=True)
        wanted = [firsts, *([one for some in each for one in some] for each in others)]
        return [
            [loader.dataset[i] for i in chosen]
            for loader, chosen in zip((self.first, *self.others), wanted, strict=True)
        ]

    def collate(self, samples: list[list[Any]]) -> tuple[Any, ...]:
        loaders = (self.first, *self.others)
        return tuple(
            (loader.collate_fn or default_collate)(own)
            for loader, own in zip(loaders, samples, strict=True)
        )
