"""Which nodes a fragment gets, once its count is known."""

import math
from random import Random

from hypothesis import strategies as st

from parsl_freetrain.core.controller.node_assignment import Want, assign, first_end
from parsl_freetrain.core.controller.node_pool import Group, Pool, PoolNode
from tests.support.properties import holds_for

Ends = dict[str, float | None]


def pool_of(**blocks: Ends) -> Pool:
    pool = Pool()
    for block, nodes in blocks.items():
        for name, until_s in nodes.items():
            pool.join(PoolNode(name, block, until_s))
    return pool


def everywhere(pool: Pool) -> dict[str, list[Group]]:
    return {'': list(pool.groups.values())}


def pick(pool: Pool, count: int, *former: str) -> tuple[str, ...] | None:
    return assign([Want('t', {'': count}, former)], everywhere(pool), pool).get('t')


def test_the_smallest_block_that_suffices() -> None:
    def pool() -> Pool:
        return pool_of(big={'b1': 9, 'b2': 9, 'b3': 9}, two={'t1': 9, 't2': 9}, one={'o1': 9})

    assert pick(pool(), 2) == ('t1', 't2')
    assert pick(pool(), 1) == ('o1',)
    assert pick(pool(), 3) == ('b1', 'b2', 'b3')


def test_what_lasts_longest_comes_first_and_an_unknown_end_lasts() -> None:
    assert pick(pool_of(b={'soon': 10, 'open': None, 'late': 99}), 2) == ('open', 'late')


def test_over_blocks_the_largest_first_so_that_they_are_few() -> None:
    pool = pool_of(
        a={'a1': None}, b={'b1': None, 'b2': None, 'b3': None}, c={'c1': None, 'c2': None}
    )
    assert pick(pool, 4) == ('b1', 'b2', 'b3', 'c1')


def test_who_shrinks_gives_back_what_ends_first_and_who_grows_keeps_all() -> None:
    ends: Ends = {'x': 10, 'y': None, 'z': 99}
    assert pick(pool_of(b=ends), 2, 'x', 'y', 'z') == ('y', 'z')
    assert set(pick(pool_of(b=ends, c={'c1': None, 'c2': None}), 4, 'x', 'z') or ()) > {'x', 'z'}


def test_nobody_gets_the_former_nodes_of_one_who_waits() -> None:
    pool = pool_of(b={'n1': None, 'n2': None, 'n3': None})
    pool.hold(['n3'], 'holds on')
    wants = [Want('waits', {'': 3}, ('n1',)), Want('new', {'': 1})]
    assert assign(wants, everywhere(pool), pool) == {'new': ('n2',)}
    assert pick(pool, 1) == ('n1',)


def test_nodes_come_from_the_place_that_was_decided() -> None:
    pool = pool_of(b={'b1': None, 'b2': None}, c={'c1': 50})
    places = {'lasting': [pool.groups['b', math.inf, '']], 'until 50': [pool.groups['c', 50, '']]}
    chosen = assign([Want('t', {'lasting': 1, 'until 50': 1}, ('b2',))], places, pool)
    assert chosen == {'t': ('b2', 'c1')}
    assert first_end(chosen['t'], pool) == 50
    assert first_end(('b2',), pool) is None


@holds_for(
    st.lists(st.tuples(st.sampled_from('abcd'), st.none() | st.integers(1, 100)), max_size=14),
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=5),
    st.randoms(use_true_random=False),
    tries=200,
)
def test_nodes_are_given_once_keepers_keep_and_nobody_both_gains_and_loses(
    ends: list[tuple[str, int | None]], changes: list[tuple[int, int]], random: Random
) -> None:
    nodes = [PoolNode(f'n{i:02d}', block, until_s) for i, (block, until_s) in enumerate(ends)]
    order = random.sample(range(len(nodes)), len(nodes))
    wants, used = [], 0
    for i, (had, then) in enumerate(
        changes
    ):  # each had some nodes of its own, and is to have others
        had_names = tuple(nodes[k].name for k in order[used : used + had])
        wants.append(Want(f't{i}', {'': then}, had_names))
        used += had
    chosen = []
    for shuffled in (nodes, random.sample(nodes, len(nodes))):
        pool = Pool()
        for node in shuffled:
            pool.join(node)
        chosen.append(assign(wants, everywhere(pool), pool))
        given = [name for names in chosen[-1].values() for name in names]
        free = [name for group in pool.groups.values() for name in group.free]
        assert sorted(given + free) == sorted(node.name for node in nodes)
    assert chosen[0] == chosen[1]
    for want in wants:
        got = chosen[0].get(want.trainer)
        if got is None:
            continue
        assert len(set(got)) == len(got) == want.counts['']
        assert set(got) >= set(want.former) or set(got) <= set(want.former)
    if sum(want.counts[''] for want in wants) <= len(nodes):
        assert len(chosen[0]) == len(wants)
