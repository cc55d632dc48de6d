"""Which nodes a fragment gets, once its count is known."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from parsl_freetrain.core.assignment import FreeNode, pick_nodes


def free(**blocks: dict[str, float | None]) -> dict[str, FreeNode]:
    return {name: FreeNode(name, block, until_s) for block, nodes in blocks.items() for name, until_s in nodes.items()}


def test_the_smallest_block_that_suffices() -> None:
    nodes = free(big={'b1': 9, 'b2': 9, 'b3': 9}, two={'t1': 9, 't2': 9}, one={'o1': 9})
    assert set(pick_nodes(nodes, 2, spans_blocks=True)) == {'t1', 't2'}
    assert pick_nodes(nodes, 1, spans_blocks=True) == ('o1',)
    assert set(pick_nodes(nodes, 3, spans_blocks=False)) == {'b1', 'b2', 'b3'}


def test_what_lasts_longest_comes_first_and_an_unknown_end_lasts() -> None:
    nodes = free(b={'soon': 10, 'open': None, 'late': 99})
    assert pick_nodes(nodes, 2, spans_blocks=True) == ('open', 'late')


def test_over_blocks_the_largest_first_so_that_they_are_few() -> None:
    nodes = free(a={'a1': None}, b={'b1': None, 'b2': None, 'b3': None}, c={'c1': None, 'c2': None})
    assert pick_nodes(nodes, 4, spans_blocks=True) == ('b1', 'b2', 'b3', 'c1')
    assert pick_nodes(nodes, 4, spans_blocks=False) == ()


def test_too_few_are_none() -> None:
    assert pick_nodes({}, 1, spans_blocks=True) == ()
    assert pick_nodes(free(b={'b1': None}), 2, spans_blocks=True) == ()


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from('abcd'), st.none() | st.floats(0, 100)), max_size=12), st.integers(1, 12),
       st.booleans(), st.randoms(use_true_random=False))
def test_the_right_number_of_distinct_free_nodes_whatever_their_order(
        ends: list[tuple[str, float | None]], count: int, spans_blocks: bool, random: Random) -> None:
    nodes = {f'n{i}': FreeNode(f'n{i}', block, until_s) for i, (block, until_s) in enumerate(ends)}
    picked = pick_nodes(nodes, count, spans_blocks)
    sizes = [sum(node.block == block for node in nodes.values()) for block in 'abcd']
    possible = sum(sizes) if spans_blocks else max(sizes)
    assert len(set(picked)) == len(picked) == (count if count <= possible else 0)
    assert nodes.keys() >= set(picked)
    if picked and count <= max(sizes):
        assert len({nodes[name].block for name in picked}) == 1
    shuffled = list(nodes.items())
    random.shuffle(shuffled)
    assert pick_nodes(dict(shuffled), count, spans_blocks) == picked
