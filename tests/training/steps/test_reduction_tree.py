"""Sums over virtual shards: the same to the last bit however the shards are divided over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from parsl_freetrain.training.checkpoint.export import load_weights
from parsl_freetrain.training.data.sample_order import shards_of_rank
from parsl_freetrain.training.loop.context import FragmentContext
from parsl_freetrain.training.process.fork_client import ForkClient
from parsl_freetrain.training.steps.reduction_tree import Node, ShardTree
from parsl_freetrain.training.steps.shard_sum import Contribution, Layout
from tests.support.properties import holds_for
from tests.support.ranks import order, ranks


def plus(a: str, b: str) -> str:
    return f'({a}+{b})'


@given(shards=st.integers(1, 40), world_size=st.integers(1, 50), empty=st.sets(st.integers(0, 39)))
@example(shards=40, world_size=2, empty=set())
def test_the_sum_does_not_depend_on_the_ranks(
    shards: int, world_size: int, empty: set[int]
) -> None:
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


@holds_for(tries=20, seed=st.integers(0, 1000), integers=st.booleans(), half=st.booleans())
def test_what_was_put_in_is_taken_out(seed: int, integers: bool, half: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(
        torch.randn(3, 2, generator=generator).to(torch.bfloat16 if half else torch.float32)
    )
    unused = torch.nn.Parameter(torch.zeros(5))
    mean = torch.randn(2, generator=generator, dtype=torch.float64)
    counters = [torch.tensor(seed), torch.tensor([True, False])] if integers else []
    layout = Layout([weight, unused], [mean], counters, 1, 1, torch.device('cpu'))
    own = layout.empty()
    weight.grad = torch.randn(3, 2, generator=generator).to(weight.dtype)
    layout.put_gradient(own, 0, 0.25)
    layout.put_gradient(own, 1, 0.25)
    layout.put_buffers(own, [mean + 1], 0.25)
    layout.put_missing(own)
    layout.put_steps(own, [True], [(2.0,)], 0.25)
    counted = [counter.clone() for counter in counters]
    for counter in counters:
        counter.zero_()
    expected = weight.grad.clone().to(torch.float64) * 0.25
    with torch.no_grad():
        layout.take_gradients(own)
        layout.take_buffers(own, [mean + 1])
    torch.testing.assert_close(
        weight.grad.to(torch.float64), expected.to(weight.dtype).to(torch.float64)
    )
    assert unused.grad is None
    assert all(torch.equal(now, then) for now, then in zip(counters, counted, strict=True))
    assert layout.steps_in(own) == ([True], [(2.0,)])


def test_memory_that_was_used_before_leaves_nothing_in_a_sum() -> None:
    """A parameter without a gradient counts as zero, whatever the memory held."""
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    layout = Layout([one, other], [], [], 1, 1, torch.device('cpu'))

    def contribution(*with_gradient: int) -> Contribution:
        own = layout.empty()
        one.grad, other.grad = torch.full((3,), 2.0), torch.full((3,), float('nan'))
        for index in with_gradient:
            layout.put_gradient(own, index, 0.5)
        layout.put_missing(own)
        layout.put_steps(own, [True], [(7.0,)], 0.5)
        return own

    layout.release([contribution(0, 1), contribution(1)])
    total = layout.plus(contribution(0), contribution())
    layout.take_gradients(total)
    assert one.grad is not None
    assert one.grad.tolist() == [1.0] * 3
    assert other.grad is None
    assert layout.is_finite(total)
    assert layout.steps_in(total) == ([True], [(7.0,)])


def test_a_buffer_that_no_shard_changed_stays_to_the_last_bit() -> None:
    constant = torch.tensor([0.1, float('inf'), 1 / 3])
    layout = Layout([], [constant], [], 0, 0, torch.device('cpu'))
    total: Contribution | None = None
    for _ in range(3):
        own = layout.empty()
        layout.put_buffers(own, [constant.clone()], 1 / 3)
        total = own if total is None else layout.plus(total, own)
    assert total is not None
    before = constant.clone()
    layout.take_buffers(total, [before])
    assert torch.equal(constant, before)


def counts_what_it_receives(ctx: FragmentContext, elements: int) -> None:
    """Reports the number of tensor elements that each exchange brings, relative to the model's."""
    import torch.distributed as dist

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

    vars(dist).update(
        all_gather=all_gather,
        all_to_all_single=all_to_all_single,
        batch_isend_irecv=batch_isend_irecv,
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(elements // 10, 10), torch.nn.BatchNorm1d(10))
    model, optimizer = ctx.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for batch in ctx.loop(torch.randn(32, elements // 10), 16):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    ctx.report(received=sum(received) / (2 * 4 * elements))


def test_what_a_rank_receives_does_not_grow_with_the_ranks(
    fork_server: ForkClient, tmp_path: Path
) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    for world_size in (1, 2, 3, 4):
        folder = tmp_path / str(world_size)
        ordered = order(folder, shards=8, total_samples=32)
        with ranks(
            fork_server, ordered, world_size, folder, counts_what_it_receives, 20_000
        ) as gang:
            outcomes = gang.run()
        assert {outcome.how for outcome in outcomes} == {'finished'}, outcomes
        weights.append(load_weights(outcomes[0].path))
        # A slice of the sums of all nodes, and the others' slices of the total. Of 8 shards, two
        # and four ranks have one node each, and three have five nodes together.
        nodes = {1: 0, 2: 2, 3: 5, 4: 4}[world_size]
        expected = (nodes + world_size - 1) / world_size
        assert outcomes[0].metrics['received'] == pytest.approx(expected, rel=0.02)
        assert all(torch.equal(weights[0][name], weights[-1][name]) for name in weights[0])
