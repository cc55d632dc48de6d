"""Sums over virtual shards: the same to the last bit however the shards are divided over ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parsl_freetrain import FragmentContext, load_weights
from parsl_freetrain.training.data.sample_order import shards_of_rank
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.reduction_tree import Node, ShardTree
from parsl_freetrain.training.steps.shard_sum import Contribution, ShardSums
from tests.support.ranks import all_finish, order


def plus(a: str, b: str) -> str:
    return f'({a}+{b})'


@given(shards=st.integers(1, 40), world_size=st.integers(1, 50), empty=st.sets(st.integers(0, 39)))
@example(shards=40, world_size=2, empty=set())
def test_sum_does_not_depend_on_the_ranks(shards: int, world_size: int, empty: set[int]) -> None:
    tree = ShardTree(shards)
    values = [None if s in empty else str(s) for s in range(shards)]
    alone: dict[Node, str | None] = {}
    for s, value in enumerate(values):
        tree.add(alone, (s, s + 1), value, plus)
    assert alone.keys() == {tree.root}
    gathered: dict[Node, str | None] = {}
    for rank in range(world_size):
        mine: dict[Node, str | None] = {}
        for s in shards_of_rank(shards, world_size, rank):
            tree.add(mine, (s, s + 1), values[s], plus)
        assert tuple(sorted(mine)) == tree.cover(shards_of_rank(shards, world_size, rank))
        gathered.update(mine)
    total = tree.total(gathered, plus)
    assert total == alone[tree.root]
    assert (
        sorted((total or '').replace('(', '').replace(')', '').split('+'))
        == sorted(filter(None, values))
        or total is None
    )
    # Little more than one sum per rank travels.
    assert len(gathered) <= max(world_size, 1) * 2 * max(shards.bit_length() - 1, 1)


def put(sums: ShardSums, own: Contribution, indices: Sequence[int], weight: float) -> None:
    gradients = [sums.parameters[i].grad for i in indices]
    sums.put(own, range(indices[0], indices[-1] + 1) if indices else range(0), gradients, weight)


@pytest.mark.parametrize('flat', [False, True])
def test_memory_that_was_used_before_leaves_nothing_in_a_sum(flat: bool) -> None:
    """A parameter without a gradient counts as zero, whatever the memory held."""
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    sums = ShardSums([one, other], [], torch.device('cpu'))

    def contribution(*with_gradient: int) -> Contribution:
        own = sums.empty()
        one.grad, other.grad = torch.full((3,), 2.0), torch.full((3,), float('nan'))
        put(sums, own, with_gradient, 0.5)
        if flat:
            sums.pack(own)
        return own

    for used in (contribution(0, 1), contribution(1)):
        sums.release(used)
    total = sums.plus(contribution(0), contribution())
    if flat:
        total = sums.unpack(sums.pack(total), [True, False])
    sums.give(total)
    assert one.grad is not None
    assert one.grad.tolist() == [1.0] * 3
    assert other.grad is None
    assert not sums.scale(total.present)


def test_a_sum_has_the_same_bits_in_pieces_and_flat() -> None:
    """Also the sign of zero, which a rank without a gradient loses by sending zeros."""
    parameter = torch.nn.Parameter(torch.ones(2))
    sums = ShardSums([parameter], [], torch.device('cpu'))

    def contribution(*gradient: float) -> Contribution:
        own = sums.empty()
        parameter.grad = torch.tensor(gradient) if gradient else None
        put(sums, own, [0], 1.0)
        return own

    pieces = sums.plus(contribution(-0.0, 1 / 3), contribution())
    flats = [sums.pack(one).tensor for one in (contribution(-0.0, 1 / 3), contribution())]
    flat = flats[0].add_(flats[1])
    assert pieces.present[0].view(torch.int32).tolist() == flat.view(torch.int32).tolist()


def test_a_value_of_a_buffer_is_that_of_the_shards_that_changed_it() -> None:
    """To the last bit as it was where none did: most of a memory of samples, in each batch."""
    model, before = torch.nn.Module(), torch.tensor([0.1, float('inf'), 1 / 3, 7.0])
    values = before.clone()
    model.register_buffer('values', values)
    sums = ShardSums([], [model], torch.device('cpu'))
    sums.buffers.remember()
    total: Contribution | None = None
    for number in range(3):
        own = sums.empty()
        sums.buffers.undo()
        values[3] += number
        sums.put_buffers(own, 1 / 3)
        total = own if total is None else sums.plus(total, own)
    assert total is not None
    sums.buffers.settle(total.buffers)
    assert values[:3].tolist() == before[:3].tolist()
    assert values[3] == pytest.approx((8.0 + 9.0) / 2)


def counts_what_it_receives(ctx: FragmentContext, elements: int, apart: bool) -> None:
    """Reports what each exchange brings, relative to the model. ``apart``: on other computers."""
    import torch.distributed as dist

    from parsl_freetrain.training.steps import reduction_tree

    def elsewhere(*_: object) -> None:
        raise OSError

    if apart:
        vars(reduction_tree)['_map'] = elsewhere
    received: list[int] = []
    gather, to_all, swap = dist.all_gather, dist.all_to_all_single, dist.batch_isend_irecv

    def all_gather(rows: Any, *args: Any, **kwargs: Any) -> Any:
        received.append(sum(row.nbytes for row in rows))
        return gather(rows, *args, **kwargs)

    def all_to_all_single(got: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received.append(got.nbytes)
        return to_all(got, *args, **kwargs)

    def batch_isend_irecv(ops: Any) -> Any:
        received.extend(op.tensor.nbytes for op in ops if op.op is dist.irecv)
        return swap(ops)

    exchanges = {'all_gather': all_gather, 'all_to_all_single': all_to_all_single}
    vars(dist).update(exchanges, batch_isend_irecv=batch_isend_irecv)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(elements // 10, 10), torch.nn.BatchNorm1d(10))
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in ctx.loop(torch.randn(32, elements // 10), 16):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    ctx.report(received=sum(received) / (2 * 4 * elements))


def test_what_a_rank_receives_does_not_grow(fork_server: ForkClient, tmp_path: Path) -> None:
    """On one computer it reads the others' sums in their memory. The bits are the same."""
    weights: list[dict[str, torch.Tensor]] = []
    for world_size, apart in ((1, True), (3, True), (4, True), (3, False)):
        folder = tmp_path / f'{world_size} {apart}'
        ordered = order(folder, shards=8, total_samples=32)
        function = counts_what_it_receives, 20_000, apart
        outcomes = all_finish(fork_server, ordered, world_size, folder, *function)
        weights.append(load_weights(outcomes[0].path))
        # A slice of the sums of all nodes, and the others' slices of the total. Of 8 shards, four
        # ranks have one node each, and three have five nodes together.
        nodes = {1: 0, 3: 5, 4: 4}[world_size]
        expected = (nodes + world_size - 1) / world_size if apart else 0.0
        assert outcomes[0].metrics['received'] == pytest.approx(expected, rel=0.02, abs=0.02)
        assert all(torch.equal(weights[0][name], weights[-1][name]) for name in weights[0])
