"""The order of samples that a user's sampler gives, without regard to ranks and fragments."""

from __future__ import annotations

import hashlib
import operator
import random
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.data.own_generators import as_before, seed_of

Sampler = Iterable[Any] | Callable[[int], Iterable[Any]]


class SampledOrder:
    """Called with an epoch: its indices, by seed and epoch alone. ``sampler``: torch's, or a
    function; BadInput if it divides samples among ranks, gives none, or others when asked again.
    Lists that it shuffles in place are as at first whenever it is asked.
    """

    def __init__(self, sampler: Sampler, dataset_size: int, seed: int, epoch: int = 0) -> None:
        if isinstance(sampler, DistributedSampler):
            raise BadInput(
                'ctx.loop was given a DistributedSampler, which divides the samples among ranks; '
                'ctx.loop does that itself: leave it out and say shuffle=True or False, or give a '
                'sampler of all samples.'
            )
        self._sampler, self._dataset_size, self._seed = sampler, dataset_size, seed
        self.size = 0
        self.names: dict[int, str] = {}
        own = getattr(sampler, '__dict__', {}).values()
        before = [(one, [*one]) for one in own if isinstance(one, list)]
        self._shuffled: list[tuple[list[Any], list[Any]]] = []
        first = self(epoch)
        self.size = len(first)
        if not first:
            raise BadInput(f'{self.who} gives no indices; it must give at least one.')
        for one, then in before:
            if sorted(map(id, one)) == sorted(map(id, then)) and any(
                map(operator.is_not, one, then)
            ):
                self._shuffled.append((one, then))
        # A list that is turned, and not shuffled by random numbers, would stay as it is.
        if self(epoch) != first or (self._shuffled and self(epoch + 1) == first):
            raise BadInput(
                f'{self.who} gives other indices when it is asked again for the same epoch, so '
                'the order could not be continued after a stop: draw from torch, random or numpy, '
                'which are seeded for each epoch, or give a function of the epoch.'
            )

    def __call__(self, epoch: int) -> array[int]:
        with _random_numbers_of(f'{self._seed}:{epoch}:sampler') as seed:
            indices = self._ask(epoch, seed)
        if self.size and len(indices) != self.size:
            raise BadInput(
                f'{self.who} gives {len(indices)} indices for epoch {epoch} and {self.size} for '
                'the first; all epochs must have the same length.'
            )
        self.names[epoch] = hashlib.blake2b(indices.tobytes(), digest_size=8).hexdigest()
        return indices

    def _ask(self, epoch: int, seed: int) -> array[int]:
        sampler = self._sampler
        for one, then in self._shuffled:
            one[:] = then
        if isinstance(sampler, Iterable):
            if isinstance(own := getattr(sampler, 'generator', None), torch.Generator):
                own.manual_seed(seed)
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
            given = sampler
        else:
            given = sampler(epoch)
        try:
            indices = array('q', map(operator.index, given))
        except (TypeError, OverflowError) as error:
            raise BadInput(
                f'{self.who} gives something else than indices of single samples ({error}); '
                'batches are made by ctx.loop.'
            ) from None
        if indices and not 0 <= min(indices) <= max(indices) < self._dataset_size:
            wrong = min(indices) if min(indices) < 0 else max(indices)
            raise BadInput(
                f'{self.who} gives the index {wrong}; the dataset has {self._dataset_size} '
                'samples, from 0.'
            )
        return indices

    @property
    def who(self) -> str:
        named = getattr(self._sampler, '__name__', type(self._sampler).__name__)
        return f'The sampler given to ctx.loop, {named},'


def sampled_order(
    sampler: Sampler | None, dataset_size: int, seed: int, peers: Peers, epoch: int = 0
) -> SampledOrder | None:
    if sampler is None:
        return None
    order = SampledOrder(sampler, dataset_size, seed, epoch)
    if len(set(gather_bytes(peers, order.names[epoch].encode()))) > 1:
        raise BadInput(
            f'{order.who} does not give the same indices on all ranks: do not let it depend on the '
            'rank; ctx.loop gives each rank its own samples.'
        )
    return order


@contextmanager
def _random_numbers_of(text: str) -> Iterator[int]:
    """Random numbers that depend on ``text`` only; afterwards, those of before go on."""
    seed = seed_of(text)
    with as_before(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield seed


def order_name(
    chosen: SampledOrder | None, shuffle: bool, drop_last: bool, in_epoch: int, samples: int
) -> str:
    """For checkpoints; none between two epochs, where a sampler may change."""
    epoch, within = divmod(samples, in_epoch)
    name = chosen.names.get(epoch, '') if chosen is not None and within else ''
    kind = f'sampled ({name})' if name else 'sampled' if chosen else 'shuffled'
    return f'{kind if chosen or shuffle else "not shuffled"}, drop_last={drop_last}'
