"""What ``ctx.loop`` takes from a DataLoader, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from parsl_freetrain import BadInput
from parsl_freetrain.training.data.loader_settings import LoaderData, LoaderSettings

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
        (DataLoader(DATA, batch_sampler=[[1, 2]]), None, 'with a batch sampler'),
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
