"""Chooses each trainer's nodes; who grows keeps all, who shrinks those that stay longest."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from parsl_freetrain.core.controller.node_pool import Group, GroupKey, Pool, PoolNode, key_of


@dataclass(frozen=True)
class Want:
    trainer: str
    counts: Mapping[str, int]  # by place
    former: Sequence[str] = ()  # its last nodes


Order = Callable[[Iterable[PoolNode]], list[str]]  # those first that stay longest


def assign(
    wants: Sequence[Want],
    places: Mapping[str, Sequence[Group]],
    pool: Pool,
    order: Order | None = None,
) -> dict[str, tuple[str, ...]]:
    """Choose free nodes of ``places`` for all of ``wants`` that can start now, in their order, and
    take them out of their groups. Former nodes go to their trainers first, or are reserved if those
    have to wait; the rest by :func:`take`. With an ``order`` (habits of nodes), trainers with more
    nodes choose first, those that stay longest.
    """
    if order is not None:
        longest = _longest(wants, places, order, pool)
        _take_out((name for nodes in longest.values() for name in nodes), pool)
        return longest
    where = {group.key: place for place, groups in places.items() for group in groups}
    kept = {want.trainer: _keep(want, where, pool) for want in wants if want.former}
    chosen: dict[str, tuple[str, ...]] = {}
    waiting: list[str] = []
    for want in wants:
        nodes = kept.get(want.trainer, {})
        missing = {place: count - len(nodes.get(place, ())) for place, count in want.counts.items()}
        needed = ((places[place], count) for place, count in missing.items() if count)
        if any(count > sum(len(group.free) for group in several) for several, count in needed):
            waiting += (name for names in nodes.values() for name in names)
            continue
        more = {place: take(places[place], count) for place, count in missing.items() if count}
        chosen[want.trainer] = tuple(
            name for place in want.counts for name in (*nodes.get(place, ()), *more.get(place, ()))
        )
    pool.put_back(waiting)
    return chosen


def _longest(
    wants: Sequence[Want], places: Mapping[str, Sequence[Group]], order: Order, pool: Pool
) -> dict[str, tuple[str, ...]]:
    """Each trainer's nodes, none taken yet: those with most choose first, as one loss costs all."""
    free = {
        place: sorted(
            order(pool.nodes[name] for group in groups for name in group.free),
            key=lambda name: -key_of(pool.nodes[name])[1],
        )
        for place, groups in places.items()
    }
    chosen: dict[str, tuple[str, ...]] = {}
    for want in sorted(wants, key=lambda want: -sum(want.counts.values())):
        if all(count <= len(free[place]) for place, count in want.counts.items()):
            there = (name for place, count in want.counts.items() for name in free[place][:count])
            chosen[want.trainer] = tuple(there)
            for place, count in want.counts.items():
                del free[place][:count]
    return chosen


def foresee(
    wants: Sequence[Want],
    places: Mapping[str, Sequence[Group]],
    pool: Pool,
    order: Order | None = None,
) -> dict[str, tuple[str, ...]]:
    """The nodes that :func:`assign` will choose once the former ones are free, or fewer."""
    where = {group.key: place for place, groups in places.items() for group in groups}
    held = {name for want in wants for name in want.former if name in pool.holder}
    pool.put_back(held)
    expected = assign(wants, places, pool, order)
    for want in wants:
        kept = {} if want.trainer in expected else _keep(want, where, pool)
        expected.setdefault(want.trainer, tuple(name for names in kept.values() for name in names))
    pool.put_back(name for nodes in expected.values() for name in nodes)
    _take_out(held, pool)
    return expected


def _take_out(names: Iterable[str], pool: Pool) -> None:
    for name in names:
        pool.groups[key_of(pool.nodes[name])].free.discard(name)


def _keep(want: Want, where: Mapping[GroupKey, str], pool: Pool) -> dict[str, list[str]]:
    """By place, the former nodes that a trainer keeps; they are taken out of their groups."""
    usable: dict[str, list[tuple[float, str]]] = {}
    for name in want.former:
        node = pool.nodes.get(name)
        if node and name in pool.groups[key_of(node)].free and key_of(node) in where:
            usable.setdefault(where[key_of(node)], []).append((-key_of(node)[1], name))
    kept = {
        place: [name for _, name in sorted(nodes)[: want.counts.get(place, 0)]]
        for place, nodes in usable.items()
    }
    _take_out((name for names in kept.values() for name in names), pool)
    return kept


def take(groups: Iterable[Group], count: int) -> list[str]:
    """Take ``count`` free nodes of as few blocks as possible, lasting ones first, then by name."""
    by_block: dict[str, list[Group]] = {}
    for group in groups:
        if group.free:
            by_block.setdefault(group.block, []).append(group)
    sizes = {block: sum(len(g.free) for g in several) for block, several in by_block.items()}
    sufficient = [block for block, size in sizes.items() if size >= count]
    if sufficient:
        order = [min(sufficient, key=lambda b: (sizes[b], b))]
    else:
        order = sorted(sizes, key=lambda b: (-sizes[b], b))
    taken: list[str] = []
    for block in order:
        for group in sorted(by_block[block], key=lambda g: -g.until_s):
            taken += group.take(count - len(taken))
    return taken


def first_end(nodes: Iterable[str], pool: Pool) -> float | None:
    """When the first of ``nodes`` leaves, in seconds; None if no end is known."""
    end = min((key_of(pool.nodes[name])[1] for name in nodes), default=math.inf)
    return None if math.isinf(end) else end
