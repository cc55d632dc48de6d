"""Datasets that can be read only in their own order; the position does not depend on the ranks."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.data.loader import MicroBatch, seed_everything, with_own_workers

ENDLESS = 2**53  # the length that a stream counts as

_MARKS = 16


def is_stream(dataset: object) -> bool:
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, '__iter__') and not hasattr(dataset, '__getitem__')
    )


class NumberedStream(Dataset[Any]):
    """A stream with samples numbered over all passes, read whole by each rank; to go on, samples
    are skipped. ``marks``: digests by which the next fragment knows it. BadInput for an iterator.
    """

    def __init__(self, stream: Any, seed: int) -> None:
        if isinstance(stream, Iterator):
            raise BadInput(
                f'ctx.loop was given a {type(stream).__name__}, which can be read only once, so '
                'that a fragment could not go on in it: give an object that begins anew with each '
                'iter(), such as an IterableDataset.'
            )
        self._stream = with_own_workers(stream) if isinstance(stream, DataLoader) else stream
        self._seed = seed
        self._samples: Iterator[Any] = iter(())
        self._next = 0
        self._pass = -1
        self._last: tuple[int, Any] | None = None
        self.marks: dict[str, str] = {}
        self._expected: dict[str, str] = {}

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        samples = [self._sample(number) for number in numbers]
        if numbers and str(numbers[0]) not in self.marks:
            self.marks[str(numbers[0])] = _digest_of(samples[0]).hex()
            if len(self.marks) > _MARKS:  # the first ones tell orders apart, and the last is near
                del self.marks[list(self.marks)[_MARKS // 2]]
        return samples

    def check_same(self, number: int, peers: Peers) -> None:
        """Raises BadInput if a sample is not the same on all ranks, which all call this."""
        if peers.world_size == 1:
            return
        if len(set(gather_bytes(peers, _digest_of(self._sample(number))))) > 1:
            raise BadInput(
                f'Sample {number} of the stream given to ctx.loop is not the same on all ranks: do '
                'not divide the stream by rank or shuffle it differently; ctx.loop gives each rank '
                'its own samples.'
            )

    def _sample(self, number: int) -> Any:
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        if self._pass < 0 or number < self._next:
            self._begin(number)
        while self._next < number:
            self._read()
        self._last = number, self._read()
        return self._last[1]

    def _begin(self, number: int) -> None:
        self._pass, self._next = 0, 0
        self._expected = {at: its for at, its in self.marks.items() if int(at) < number}
        self.marks.clear()
        self.marks.update(self._expected)
        if number:
            print(f'Skipping {number} samples of the stream')
        self._set_epoch()
        number = max(map(int, self._expected), default=number)  # the last that can be compared
        if number and hasattr(self._stream, 'skip'):
            try:
                # Within the first pass; in later ones, reading finds the end of each.
                self._seed_for(number)
                self._samples = iter(self._stream.skip(number))
                first = next(self._samples)
            except StopIteration:
                pass
            else:
                self._samples = chain([first], self._samples)
                self._next = number
                return
        self._seed_for(0)  # also for seeds of workers, if it has any
        self._samples = iter(self._stream)

    def _read(self) -> Any:
        for fresh in (False, True):
            self._seed_for(self._next)
            if fresh:
                self._pass += 1
                self._set_epoch()
                self._samples = iter(self._stream)
                self._seed_for(self._next)
            try:
                sample = next(self._samples)
            except StopIteration:
                continue
            self._check(sample)
            self._next += 1
            return sample
        raise BadInput(f'The stream given to ctx.loop, a {type(self._stream).__name__}, is empty.')

    def _check(self, sample: Any) -> None:
        expected = self._expected.pop(str(self._next), None)
        if expected is not None and _digest_of(sample).hex() != expected:
            raise BadInput(
                f'Sample {self._next} of the stream given to ctx.loop is not the one that was read '
                'before, so samples would be lost and others repeated: the stream must give the '
                'same samples each time it is read. Shuffle it with a fixed seed (datasets: '
                'shuffle(seed=...), webdataset: detshuffle(seed=...)), or by pass in '
                'set_epoch(pass).'
            )

    def _set_epoch(self) -> None:
        if callable(set_epoch := getattr(self._stream, 'set_epoch', None)):
            set_epoch(self._pass)

    def _seed_for(self, number: int) -> None:
        seed_everything(MicroBatch((), number, 0, 0.0).seed(self._seed, 'stream'))


def _digest_of(sample: Any) -> bytes:
    return hashlib.blake2b(b''.join(_bytes_of(sample)), digest_size=16).digest()


def _bytes_of(sample: Any) -> Iterator[bytes]:
    """As far as it is known how to read it."""
    if isinstance(sample, torch.Tensor):
        flat = sample.detach().cpu().contiguous().reshape(-1)
        yield bytes(flat.view(torch.uint8).numpy()) if flat.layout is torch.strided else b''
    elif isinstance(sample, Mapping):
        for key, value in sample.items():
            yield str(key).encode()
            yield from _bytes_of(value)
    elif isinstance(sample, (list, tuple)):
        for value in sample:
            yield from _bytes_of(value)
    elif isinstance(sample, (bytes, str, int, float, np.ndarray)):
        yield sample.tobytes() if isinstance(sample, np.ndarray) else repr(sample).encode()
