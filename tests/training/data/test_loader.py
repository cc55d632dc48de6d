"""Loading of batches for an accelerator. There is none here, so what torch does with one is
replaced; ``make gpu`` has the same test with a real one. What ``ctx.loop`` takes from a DataLoader.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from parsl_freetrain import BadInput
from parsl_freetrain.training.data.loader import MicroBatch, make_loader, to_device
from parsl_freetrain.training.data.loader_settings import LoaderData, LoaderSettings

CPU, GPU = torch.device('cpu'), torch.device('cuda', 0)


@pytest.mark.parametrize(('device', 'locked'), [(GPU, 2), (CPU, 0)], ids=['gpu', 'cpu'])
def test_batches_for_an_accelerator_are_page_locked_and_their_copies_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, locked: int
) -> None:
    pinned: list[int] = []
    copied: list[tuple[Any, Any]] = []

    def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor

    def copy(tensor: torch.Tensor, to: torch.device, *, non_blocking: bool) -> torch.Tensor:
        copied.append((tensor.data_ptr(), non_blocking))
        return tensor

    monkeypatch.setattr(torch.accelerator, 'is_available', lambda: True)
    monkeypatch.setattr(torch.accelerator, 'current_accelerator', lambda: GPU)
    monkeypatch.setattr(torch.Tensor, 'pin_memory', pin_memory)
    monkeypatch.setattr(torch.Tensor, 'to', copy)
    micro_batches = [MicroBatch((0, 1), 0, 0, 1.0), MicroBatch((2, 3), 2, 0, 1.0)]
    data = list(torch.arange(4.0))
    batches = list(make_loader(data, micro_batches, 7, LoaderSettings(), device))
    assert [batch.tolist() for batch in batches] == [[0.0, 1.0], [2.0, 3.0]]
    assert pinned == [batch.data_ptr() for batch in batches][:locked]
    to_device({'x': [batches[0]], 'y': (batches[1], 'text')}, device)
    assert copied == [(batch.data_ptr(), True) for batch in batches][:locked]


class Record(dict[str, Any]):
    """As in many training scripts: entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Graphs(list[Any]):
    def __init__(self, graphs: list[Any], number: int) -> None:
        super().__init__(graphs)
        self.number = number


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass(frozen=True)
class Scan:
    x: torch.Tensor
    name: str


X = torch.zeros(3, 2)
PACKED = nn.utils.rnn.pack_padded_sequence(X[None], torch.tensor([3]), batch_first=True)


@pytest.mark.parametrize(
    ('batch', 'moved'),
    [
        (Record(x=X, name='a'), lambda b: b.x),
        (OrderedDict(x=X, name='a'), lambda b: b['x']),
        (Graphs([X, 'a'], 2), lambda b: b[0] if b.number == 2 else None),
        (Pair(X, 'a'), lambda b: b.x),
        (Scan(X, 'a'), lambda b: b.x),
        ((X, ['a', {'x': X}]), lambda b: b[1][1]['x']),
        (PACKED, lambda b: b.data),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_keeps_its_class(batch: Any, moved: Any) -> None:
    there = to_device(batch, torch.device('meta'))
    assert type(there) is type(batch) and moved(there).device.type == 'meta'
    assert moved(batch).device.type == 'cpu'
    assert to_device(batch, CPU) is batch


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize('kind', [TensorDataset, Doubled])
@pytest.mark.parametrize('seed', [None, 7])
@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_batches_of_tensors_are_those_of_torch(
    kind: type[TensorDataset], seed: int | None, layout: torch.memory_format
) -> None:
    images = torch.randn(8, 3, 4, 4).to(memory_format=layout)
    data = kind(images, torch.arange(8), torch.randn(8, 2).bfloat16())
    picked = [(5, 0, 3), (7, 7)]
    micro_batches = [MicroBatch(indices, 0, 0, 1.0) for indices in picked]
    ours = list(make_loader(data, micro_batches, seed, LoaderSettings(), CPU))
    theirs = list(DataLoader(data, batch_sampler=map(list, picked)))
    assert [type(batch) for batch in ours] == [type(batch) for batch in theirs] == [list, list]
    for mine, its in zip(chain(*ours), chain(*theirs), strict=True):
        assert mine.dtype == its.dtype
        assert mine.stride() == its.stride()
        assert torch.equal(mine, its)


DATA = TensorDataset(torch.arange(8.0))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(8))


def of_loop(data: Any, batch_size: int | None = None) -> LoaderData:
    return LoaderData.of_loop(data, batch_size, LoaderSettings())


def test_a_data_loader_gives_its_own_settings() -> None:
    found = of_loop(DataLoader(DATA, batch_size=4, shuffle=True, num_workers=2))
    assert found.dataset is DATA
    assert (found.batch_size, found.shuffle, found.num_workers) == (4, True, 2)
    assert not of_loop(DataLoader(DATA, batch_size=4)).shuffle
    found = of_loop(DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, True)))
    assert (found.batch_size, found.shuffle, found.drop_last) == (3, True, True)
    stream = Stream()
    assert of_loop(DataLoader(stream, batch_size=4)).dataset is stream
    samples = DataLoader(stream, batch_size=None, num_workers=2)
    assert of_loop(samples, 4).dataset is samples


def test_what_would_be_unclear_is_refused() -> None:
    for data, batch_size, sentence in (
        (DATA, None, 'without a batch size'),
        (DataLoader(Stream(), batch_size=None), None, 'without a batch size'),
        (DataLoader(DATA, batch_size=4), 4, 'has settings of its own'),
        (DataLoader(Stream(), batch_size=4, num_workers=1), None, 'batch_size=None, num_workers'),
        (DataLoader(DATA, batch_sampler=[[1, 2]]), None, 'has a list as its batch sampler'),
    ):
        with pytest.raises(BadInput) as refused:
            of_loop(data, batch_size)
        assert sentence in str(refused.value)


class OwnWay(DataLoader[Any]):
    def __iter__(self) -> Any:
        return map(abs, super().__iter__())


class OwnIterator(DataLoader[Any]):
    def _get_iterator(self) -> Any:
        return super()._get_iterator()


@pytest.mark.parametrize(('kind', 'name'), [(OwnWay, '__iter__'), (OwnIterator, '_get_iterator')])
def test_a_data_loader_with_an_iterator_of_its_own_is_refused(kind: Any, name: str) -> None:
    with pytest.raises(BadInput, match=f'a {kind.__name__}, a DataLoader with a {name} of its'):
        of_loop(kind(DATA, batch_size=4))
    with pytest.raises(BadInput, match=f'with a {name} of its own'):
        LoaderData.of(kind(DATA, batch_size=4), 'the training')
