"""The data order, with samplers and without, is the same for any ranks and cuts."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from parsl_freetrain import BadInput, FragmentContext, same_weights
from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data import sample_order as so
from parsl_freetrain.training.data.sample_order import GlobalOrder, shards_of_rank
from parsl_freetrain.training.data.sampler import SampledOrder, order_name, sampled_order
from parsl_freetrain.training.process.fork_client import ForkClient
from tests.support.cuts import made, step
from tests.support.properties import holds_for
from tests.support.ranks import ended, order
from tests.support.waiting import LIMIT_S


@st.composite
def plain_orders(draw: st.DrawFn) -> GlobalOrder:
    """Small plain_orders whose total may end within an epoch and within a batch."""
    size = draw(st.integers(1, 40))
    return GlobalOrder(
        size,
        draw(st.integers(1, 50)),
        draw(st.integers(-2, 2**40)),
        shuffle=draw(st.booleans()),
        total_samples=draw(st.integers(1, 4 * size)),
    )


@holds_for(plain_orders(), tries=60)
def test_every_sample_is_seen_once_per_epoch(order: GlobalOrder) -> None:
    batches = list(order.batches(0))
    seen: dict[int, list[int]] = {}
    position = 0
    for batch in batches:
        assert batch.samples_before == position
        assert 1 <= len(batch.indices) <= order.batch_size
        assert batch.epoch == position // order.dataset_size
        seen.setdefault(batch.epoch, []).extend(batch.indices)
        position += len(batch.indices)
    assert position == order.total_samples
    for epoch, indices in seen.items():
        left = order.total_samples - epoch * order.dataset_size
        assert len(set(indices)) == len(indices) == min(order.dataset_size, left)
        assert set(indices) <= set(range(order.dataset_size))


@given(st.integers(0, 60), st.integers(1, 20))
def test_shards_are_contiguous_and_near_equal(size: int, shards: int) -> None:
    parts = so.shard(range(size), shards)
    assert len(parts) == shards
    assert [index for part in parts for index in part] == list(range(size))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@holds_for(
    st.integers(1, 9),
    st.lists(st.sampled_from([0.5, 1.0, 1.7, 40.0]), min_size=1, max_size=3),
    tries=30,
)
def test_shards_are_dealt_by_speed(shards: int, speeds: list[float]) -> None:
    ranks = [shards_of_rank(shards, len(speeds), r, speeds) for r in range(len(speeds))]
    assert [s for rank in ranks for s in rank] == list(range(shards))
    last = max(len(rank) / speed for rank, speed in zip(ranks, speeds, strict=True))
    assert last == min(
        max(n / speed for n, speed in zip(counts, speeds, strict=True))
        for counts in product(range(shards + 1), repeat=len(speeds))
        if sum(counts) == shards
    )
    assert shards_of_rank(6, 2, 0, (1.0, 0.5)) == range(4)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epochs(seed: int) -> list[tuple[int, ...]]:
        whole = GlobalOrder(50, 50, seed, total_samples=100)
        return [tuple(batch.indices) for batch in whole.batches(0)]

    first, second = epochs(1)
    assert first != second
    assert epochs(1) == [first, second]
    assert epochs(2) != [first, second]


def test_the_order_is_fixed_for_good() -> None:
    """A checkpoint of an earlier version must find its data order again."""
    [batch] = GlobalOrder(10, 10, 7, total_samples=10).batches(0)
    assert tuple(batch.indices) == (7, 1, 6, 9, 5, 8, 2, 0, 4, 3)


def test_the_order_neither_uses_nor_moves_the_users_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = list(GlobalOrder(10, 3, 7, total_samples=20).batches(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device('meta')
        assert list(GlobalOrder(10, 3, 7, total_samples=20).batches(0)) == first
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_without_shuffle_the_order_is_the_datasets() -> None:
    batches = list(GlobalOrder(5, 2, 0, shuffle=False, total_samples=8).batches(0))
    assert [tuple(batch.indices) for batch in batches] == [(0, 1), (2, 3), (4,), (0, 1), (2,)]


def test_a_position_where_no_batch_ends_is_refused_at_once() -> None:
    for done in (3, 9, 24, -1, -4):
        sentence = rf'is at {done} samples.* 4, 10 samples in the dataset and 23 in total'
        with pytest.raises(BadInput, match=sentence):
            GlobalOrder(10, 4, 0, total_samples=23).batches(done)


def test_empty_orders_are_refused() -> None:
    for size, batch, total, sentence in (
        (0, 4, 5, 'The number of samples of the dataset is 0; it must be at least 1.'),
        (5, 0, 5, 'The global batch size is 0; it must be at least 1 sample.'),
        (5, 4, 0, 'The total to train, in samples, is 0; it must be at least 1.'),
    ):
        with pytest.raises(BadInput) as raised:
            GlobalOrder(size, batch, 0, total_samples=total)
        assert str(raised.value) == sentence


def test_ranks_and_shards_that_do_not_exist_are_refused() -> None:
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(BadInput, match=f'rank among {world_size} is {rank}; it must be'):
            so.split_for_ranks((1, 2), world_size, rank)
        with pytest.raises(BadInput, match=f'rank among {world_size} is {rank}; it must be'):
            shards_of_rank(4, world_size, rank)
    with pytest.raises(BadInput, match='shards of a batch is 0'):
        so.shard((1, 2), 0)
    with pytest.raises(BadInput, match='shards of a batch is 0'):
        shards_of_rank(0, 1, 0)


def test_epochs_in_samples() -> None:
    for epochs, size, samples in ((1, 7, 7), (2.5, 10, 25), (0.1, 3, 1), (0.3, 10, 3)):
        assert so.samples_in(epochs, size) == samples
    for wrong in (0, -1.0, float('nan'), float('inf')):
        with pytest.raises(BadInput, match='in epochs, is .*; it must be a number above 0'):
            so.samples_in(wrong, 10)


def test_the_submitting_side_needs_no_torch() -> None:
    code = (
        'import sys, parsl_freetrain.training.data.sample_order as s; '
        'import parsl_freetrain.training.checkpoint.store; '
        'assert s.samples_in(2, 5) == 10; sys.exit("torch" in sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True, timeout=LIMIT_S)


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
SHUFFLES = [True, False]
"""Without a sampler."""


@st.composite
def orders(draw: st.DrawFn) -> tuple[Callable[[], GlobalOrder], GlobalOrder]:
    """A function that makes an order anew, as each fragment does, and one that it has made."""
    kinds: list[Any] = [*sorted(SAMPLERS), *SHUFFLES]
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 2**40))
    size = SIZE if isinstance(kind, bool) else SampledOrder(SAMPLERS[kind](), SIZE, seed).size
    drop_last = draw(st.booleans())
    batch = draw(st.integers(1, size if drop_last else 50))
    total = draw(st.integers(1, 3 * size // batch + 1)) * batch
    total -= 0 if drop_last else draw(st.integers(0, batch - 1))

    def made() -> GlobalOrder:
        options: Any = {'drop_last': drop_last, 'total_samples': total}
        if isinstance(kind, bool):
            return GlobalOrder(size, batch, seed, shuffle=kind, **options)
        sampled = SampledOrder(SAMPLERS[kind](), SIZE, seed)
        return GlobalOrder(sampled.size, batch, seed, sampler=sampled, **options)

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
        if whole.sampler is None and whole.shuffle:
            break
        epoch = range(SIZE) if whole.sampler is None else whole.sampler(batch.epoch)
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


class InPlace:
    """As MPerClassSampler of pytorch-metric-learning, which shuffles its list of classes."""

    def __init__(self, turns: bool) -> None:
        self.order, self.turns = [*range(SIZE)], turns

    def __iter__(self) -> Iterator[int]:
        if self.turns:
            self.order.append(self.order.pop(0))
        else:
            random.shuffle(self.order)
        return iter([*self.order])


def test_a_list_that_is_shuffled_in_place_begins_anew_in_each_epoch() -> None:
    first = SampledOrder(InPlace(False), SIZE, 1)
    assert [first(epoch) for epoch in (0, 1, 2)] == [
        SampledOrder(InPlace(False), SIZE, 1, epoch)(epoch) for epoch in (0, 1, 2)
    ]
    assert first(0) != first(1)


def test_what_has_no_fixed_order_is_refused() -> None:
    for sampler, sentence in (
        (DistributedSampler(list(DATA), 2, 0), 'divides the samples among ranks'),  # type: ignore[arg-type]
        (BatchSampler(SequentialSampler(DATA), 4, False), 'something else than indices of single'),
        ([0.5], 'something else than indices'),
        ([0, SIZE], f'gives the index {SIZE}; the dataset has {SIZE} samples, from 0'),
        ([-1, 0], 'gives the index -1'),
        ([], 'gives no indices'),
        (InPlace(True), 'InPlace, gives other indices when it is asked again'),
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
            how: Any = {'total_samples': total, 'aligned': aligned, 'drop_last': True}
            GlobalOrder(size, batch, 0, **how).batches(0)


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
    model, optimizer = made(ctx)
    for x in ctx.loop(Seen(seen), 8, sampler=sampler, worker_init_fn=name_worker, **options):
        if ctx.samples == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        step(model, optimizer, x)


def by_rank(epoch: int) -> list[int]:
    return [os.getpid() % SIZE] * SIZE


def test_training_with_a_sampler_in_fragments(fork_server: ForkClient, tmp_path: Path) -> None:
    """Weighted, no short batches, workers: the same bits on one rank, and on three and then two."""
    weighted = SAMPLERS['weighted']()

    def fragment(number: int, world_size: int, folder: str, **options: Any) -> Any:
        ordered = order(tmp_path / folder, number, total_epochs=3)
        options = {'sampler': weighted, 'drop_last': True, **options}
        seen = tmp_path / f'{folder}-{number}'
        return ended(fork_server, ordered, world_size, tmp_path, train, seen, **options)[0]

    whole = fragment(1, 1, 'whole', num_workers=1)
    assert (whole.how, whole.samples) == ('finished', 3 * 24), whole.error
    told = [line.split() for line in (tmp_path / 'whole-1').read_text().splitlines()]
    assert {worker for _, _, worker in told} == {'0'}
    assert len({pid for _, pid, _ in told}) == 1  # one worker for all epochs
    stopped = fragment(1, 3, 'cut', stop_at=32)
    assert stopped.how == 'stopped' and 32 < stopped.samples < 72
    refused = fragment(2, 2, 'cut', sampler=SAMPLERS['replacement']())
    assert 'the order of the samples has changed from sampled (' in refused.error.message
    last = fragment(3, 2, 'cut')
    assert last.how == 'finished', last.error
    assert same_weights(whole.path, last.path)
    apart = fragment(1, 2, 'apart', sampler=by_rank)
    assert 'does not give the same indices on all ranks' in apart.error.message
