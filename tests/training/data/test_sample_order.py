"""The data order: the same for every sequence of interruptions and every number of ranks."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle, islice, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.data import sample_order as so
from parsl_freetrain.training.data.sample_order import GlobalOrder, shards_of_rank
from tests.support.properties import holds_for
from tests.support.waiting import LIMIT_S


@st.composite
def orders(draw: st.DrawFn) -> GlobalOrder:
    """Small orders whose total may end within an epoch and within a batch."""
    size = draw(st.integers(1, 40))
    return GlobalOrder(
        size,
        draw(st.integers(1, 50)),
        draw(st.integers(-2, 2**40)),
        shuffle=draw(st.booleans()),
        total_samples=draw(st.integers(1, 4 * size)),
    )


def interrupted(order: GlobalOrder, fragments: list[int]) -> Iterator[so.GlobalBatch]:
    """The batches of a training in fragments of a fixed number of steps."""
    done = 0
    for steps in cycle(fragments):
        for batch in islice(order.batches(done), steps):
            yield batch
            done += len(batch.indices)
        if done == order.total_samples:
            return


@holds_for(orders(), st.lists(st.integers(1, 5), min_size=1, max_size=6), tries=60)
def test_interruptions_do_not_change_the_order(order: GlobalOrder, fragments: list[int]) -> None:
    assert list(interrupted(order, fragments)) == list(order.batches(0))


@holds_for(orders(), tries=60)
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


@holds_for(orders(), st.integers(1, 9), st.integers(1, 9), tries=60)
def test_ranks_cover_each_batch_in_order_whatever_their_number(
    order: GlobalOrder, shards: int, ranks: int
) -> None:
    for batch in order.batches(0):
        parts = so.shard(batch.indices, shards)
        by_shards = [
            index
            for rank in range(ranks)
            for s in shards_of_rank(shards, ranks, rank)
            for index in parts[s]
        ]
        by_ranks = [
            index
            for rank in range(ranks)
            for index in so.split_for_ranks(batch.indices, ranks, rank)
        ]
        assert by_shards == by_ranks == list(batch.indices)


@given(st.integers(0, 60), st.integers(1, 20))
def test_shards_are_contiguous_and_near_equal(size: int, shards: int) -> None:
    parts = so.shard(range(size), shards)
    assert len(parts) == shards
    assert [index for part in parts for index in part] == list(range(size))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 20), st.integers(1, 20))
def test_each_shard_has_exactly_one_rank(shards: int, ranks: int) -> None:
    assert [s for rank in range(ranks) for s in shards_of_rank(shards, ranks, rank)] == list(
        range(shards)
    )


@given(st.integers(1, 12), st.lists(st.sampled_from([0.5, 1.0, 1.7, 40.0]), min_size=1, max_size=3))
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
        return [
            tuple(batch.indices)
            for batch in GlobalOrder(50, 50, seed, total_samples=100).batches(0)
        ]

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


def test_nothing_is_left_at_the_total() -> None:
    assert list(GlobalOrder(10, 4, 0, total_samples=9).batches(9)) == []


@pytest.mark.parametrize('samples_done', [3, 9, 24, -1, -4])
def test_a_position_where_no_batch_ends_is_refused_at_once(samples_done: int) -> None:
    sentence = rf'is at {samples_done} samples.* 4, 10 samples in the dataset and 23 in total'
    with pytest.raises(BadInput, match=sentence):
        GlobalOrder(10, 4, 0, total_samples=23).batches(samples_done)


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


@pytest.mark.parametrize(
    ('epochs', 'size', 'samples'),
    [(1, 7, 7), (2.5, 10, 25), (0.1, 3, 1), (0.3, 10, 3), (3, 1797, 5391)],
)
def test_epochs_in_samples(epochs: float, size: int, samples: int) -> None:
    assert so.samples_in(epochs, size) == samples


@pytest.mark.parametrize('epochs', [0, -1.0, float('nan'), float('inf')])
def test_impossible_epochs_are_refused(epochs: float) -> None:
    with pytest.raises(BadInput, match='in epochs, is .*; it must be a number above 0'):
        so.samples_in(epochs, 10)


def test_the_submitting_side_needs_no_torch() -> None:
    code = (
        'import sys, parsl_freetrain.training.data.sample_order as s; '
        'import parsl_freetrain.training.checkpoint.store; '
        'assert s.samples_in(2, 5) == 10; sys.exit("torch" in sys.modules)'
    )
    assert (
        subprocess.run([sys.executable, '-c', code], check=False, timeout=LIMIT_S).returncode == 0
    )
