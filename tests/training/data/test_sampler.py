"""Samplers and short batches: the same samples in the same order for any ranks and cuts."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from parsl_freetrain import BadInput, FragmentContext
from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data import sample_order as so
from parsl_freetrain.training.data.sample_order import GlobalOrder
from parsl_freetrain.training.data.sampler import SampledOrder, order_name, sampled_order
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.properties import holds_for
from tests.support.ranks import order, ranks

SIZE = 23


def by_function(epoch: int) -> list[int]:
    """An order of an epoch that uses all kinds of random numbers."""
    drawn = random.sample(range(SIZE), 8) + np.random.permutation(SIZE)[:4].tolist()
    return [*drawn, *torch.randperm(SIZE)[:5].tolist(), epoch % SIZE]


class OfEpoch:
    """As DistributedSampler and its like are told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch))


DATA = range(SIZE)
SAMPLERS: dict[str, Callable[[], Any]] = {
    'weighted': lambda: WeightedRandomSampler([1.0 + i for i in range(SIZE)], 30),
    'own generator': lambda: RandomSampler(DATA, generator=torch.Generator()),
    'replacement': lambda: RandomSampler(DATA, replacement=True, num_samples=40),
    'subset': lambda: SubsetRandomSampler([3, 5, 8, 13]),
    'sequential': lambda: SequentialSampler(DATA),
    'list': lambda: [5, 4, 3, 3, 3],
    'array': lambda: np.arange(SIZE)[::-1],
    'function': lambda: by_function,
    'set_epoch': OfEpoch,
}


@st.composite
def orders(draw: st.DrawFn) -> tuple[Callable[[], GlobalOrder], GlobalOrder]:
    """A function that makes an order anew, as each fragment does, and one that it has made."""
    make, seed = SAMPLERS[draw(st.sampled_from(sorted(SAMPLERS)))], draw(st.integers(0, 2**40))
    size = SampledOrder(make(), SIZE, seed).size
    drop_last = draw(st.booleans())
    batch = draw(st.integers(1, size if drop_last else 50))
    total = draw(st.integers(1, 3 * size // batch + 1)) * batch
    total -= 0 if drop_last else draw(st.integers(0, batch - 1))

    def made() -> GlobalOrder:
        sampled = SampledOrder(make(), SIZE, seed)
        options: Any = {'sampler': sampled, 'drop_last': drop_last, 'total_samples': total}
        return GlobalOrder(sampled.size, batch, seed, **options)

    return made, made()


@holds_for(
    orders(),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
    st.integers(1, 7),
    st.data(),
    tries=60,
)
def test_the_order_depends_neither_on_cuts_nor_on_ranks(
    one: tuple[Callable[[], GlobalOrder], GlobalOrder],
    fragments: list[int],
    shards: int,
    data: st.DataObject,
) -> None:
    make, whole = one
    expected = list(whole.batches(0))
    done, seen = 0, []
    for steps in cycle(fragments):
        world = data.draw(st.integers(1, 6))
        random.seed(done)  # other random numbers have been drawn in every process
        torch.manual_seed(done)
        for batch in islice(make().batches(done), steps):
            parts = so.shard(batch.indices, shards)
            mine = [[parts[s] for s in so.shards_of_rank(shards, world, r)] for r in range(world)]
            indices = [*chain(*chain(*mine))]
            split = chain(*(so.split_for_ranks(batch.indices, world, r) for r in range(world)))
            assert indices == list(split)
            seen.append((batch.samples_before, batch.epoch, indices))
            done += len(indices)
        if done == whole.total_samples:
            break
    assert seen == [(b.samples_before, b.epoch, list(b.indices)) for b in expected]
    if whole.drop_last:
        assert {len(b.indices) for b in expected} == {whole.batch_size}
    # Each epoch is what the sampler says, without its short batch.
    for batch in expected:
        start = batch.samples_before - batch.epoch * whole.epoch_size
        assert whole.sampler is not None
        epoch = whole.sampler(batch.epoch)
        assert list(batch.indices) == list(epoch[start : start + len(batch.indices)])


def test_epochs_differ_and_the_users_random_numbers_go_on() -> None:
    weighted = SampledOrder(SAMPLERS['weighted'](), SIZE, 1)
    assert len({tuple(weighted(epoch)) for epoch in range(4)}) == 4
    counts = np.bincount([i for epoch in range(200) for i in weighted(epoch)], minlength=SIZE)
    assert counts[-1] > 8 * counts[0]  # 23 times as heavy
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    weighted(7)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_the_order_of_a_sampler_is_fixed_for_good() -> None:
    """A checkpoint of an earlier version must find its data order again."""
    assert SampledOrder(SAMPLERS['own generator'](), SIZE, 7)(1)[:6].tolist() == FIXED
    assert order_name(None, True, False, 8, 0) == 'shuffled, drop_last=False'


FIXED = [12, 4, 3, 19, 17, 5]


class Drifting:
    """Draws from a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        self.drawn = np.random.default_rng(1)

    def __iter__(self) -> Iterator[int]:
        yield from self.drawn.permutation(SIZE)


def test_what_has_no_fixed_order_is_refused() -> None:
    for sampler, sentence in (
        (DistributedSampler(list(DATA), 2, 0), 'divides the samples among ranks'),  # type: ignore[arg-type]
        (BatchSampler(SequentialSampler(DATA), 4, False), 'something else than indices of single'),
        ([0.5], 'something else than indices'),
        ([0, SIZE], f'gives the index {SIZE}; the dataset has {SIZE} samples, from 0'),
        ([-1, 0], 'gives the index -1'),
        ([], 'gives no indices'),
        (Drifting(), 'Drifting, gives other indices when it is asked again'),
    ):
        with pytest.raises(BadInput, match=sentence):
            sampled_order(sampler, SIZE, 1, Peers())


def test_epochs_of_unequal_lengths_are_refused() -> None:
    growing = SampledOrder(lambda epoch: range(5 + epoch), SIZE, 1)
    with pytest.raises(BadInput, match='<lambda>, gives 7 indices for epoch 2 and 5 for the first'):
        growing(2)


def test_short_batches_that_cannot_be_left_out() -> None:
    for size, batch, total, aligned, sentence in (
        (5, 8, 8, True, 'an epoch of 5 samples has no full batch of 8'),
        (10, 4, 10, True, 'say 8 samples'),
        (10, 4, 8, False, 'in scaled mode'),
    ):
        with pytest.raises(BadInput, match=sentence):
            order = GlobalOrder(
                size, batch, 0, total_samples=total, aligned=aligned, drop_last=True
            )
            order.batches(0)


class Seen(Dataset[Any]):
    """Writes down what is asked for, and by whom."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, ''

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.path.open('a') as file:
            file.write(f'{index} {os.getpid()} {os.environ.get("WORKER")}\n')
        return torch.full((2,), index / SIZE) + 0.1 * torch.randn(2)


def name_worker(number: int) -> None:
    os.environ['WORKER'] = str(number)


def train(
    ctx: FragmentContext, seen: Path, sampler: Any, stop_at: int | None = None, **options: Any
) -> None:
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    model, optimizer = ctx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = Seen(seen)
    for x in ctx.loop(data, 8, sampler=sampler, worker_init_fn=name_worker, **options):
        if ctx.samples == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def by_rank(epoch: int) -> list[int]:
    return [os.getpid() % SIZE] * SIZE


def test_training_with_a_sampler_in_fragments(fork_server: ForkClient, tmp_path: Path) -> None:
    """Weighted, without short batches, with workers: the same samples and bits, on one rank and on
    three ranks and then two.
    """
    weighted = SAMPLERS['weighted']()

    def fragment(number: int, world_size: int, folder: str, **options: Any) -> Any:
        ordered = order(tmp_path / folder, number, total_epochs=3)
        options = {'sampler': weighted, 'drop_last': True, **options}
        seen = tmp_path / f'{folder}-{number}'
        with ranks(fork_server, ordered, world_size, tmp_path, train, seen, **options) as gang:
            (first, *_) = gang.run()
        return first

    whole = fragment(1, 1, 'whole', num_workers=1)
    assert (whole.how, whole.samples) == ('finished', 3 * 24), whole.error
    told = [line.split() for line in (tmp_path / 'whole-1').read_text().splitlines()]
    assert {worker for _, _, worker in told} == {'0'}
    assert len({pid for _, pid, _ in told}) == 1  # one worker for all epochs
    stopped = fragment(1, 3, 'cut', stop_at=32)
    assert stopped.how == 'stopped' and 32 < stopped.samples < 72
    refused = fragment(2, 2, 'cut', sampler=SAMPLERS['replacement']())
    assert 'the order of the samples has changed from sampled (' in refused.error.message
    ended = fragment(3, 2, 'cut')
    assert ended.how == 'finished', ended.error
    one, cut = load_weights(whole.path), load_weights(ended.path)
    assert all(torch.equal(one[name], cut[name]) for name in one)
    apart = fragment(1, 2, 'apart', sampler=by_rank)
    assert 'does not give the same indices on all ranks' in apart.error.message
