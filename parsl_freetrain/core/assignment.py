"""Which nodes, once it is known how many.

Nothing migrates: a trainer that goes on with more nodes keeps all that it had, one that goes on with fewer keeps those that last longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parsl_freetrain.core.pool import Group, Pool, key_of


@dataclass(frozen=True)
class Want:
    """What a trainer is to start on.

    Attributes
    ----------
    trainer
        Its name.
    counts
        How many nodes of each place.
    former
        The nodes that it had last, as far as it had any.
    """

    trainer: str
    counts: Mapping[str, int]
    former: Sequence[str] = ()


def assign(wants: Sequence[Want], places: Mapping[str, Sequence[Group]], pool: Pool) -> dict[str, tuple[str, ...]]:
    """Choose free nodes for as many of ``wants`` as can start now, the first ones first; the same question has the same answer.

    Everybody's former nodes come first, also those of trainers that have to wait, which nobody else gets; then :func:`take`.

    Parameters
    ----------
    wants
        Who starts on how many nodes.
    places
        The groups of which each place consists.
    pool
        The nodes; those chosen are taken out of their groups.

    Returns
    -------
    dict
        By trainer, exactly as many nodes as it wants; who has to wait for nodes that are still held is no key.
    """
    where = {(group.block, group.until_s): place for place, groups in places.items() for group in groups}
    kept = {want.trainer: _keep(want, where, pool) for want in wants if want.former}
    chosen: dict[str, tuple[str, ...]] = {}
    waiting: list[str] = []
    for want in wants:
        nodes = kept.get(want.trainer, {})
        missing = {place: count - len(nodes.get(place, ())) for place, count in want.counts.items()}
        if any(count > sum(len(group.free) for group in places[place]) for place, count in missing.items() if count):
            waiting += (name for names in nodes.values() for name in names)
            continue
        more = {place: take(places[place], count) for place, count in missing.items() if count}
        chosen[want.trainer] = tuple(name for place in want.counts for name in (*nodes.get(place, ()), *more.get(place, ())))
    pool.put_back(waiting)
    return chosen


def foresee(wants: Sequence[Want], places: Mapping[str, Sequence[Group]], pool: Pool) -> dict[str, tuple[str, ...]]:
    """The nodes that :func:`assign` will choose once the former ones are free, should nothing else change; fewer where others hold some.

    Parameters and result otherwise as there; nothing is taken.
    """
    where = {(group.block, group.until_s): place for place, groups in places.items() for group in groups} if wants else {}
    expected: dict[str, tuple[str, ...]] = {}
    taken: list[str] = []
    for want in wants:
        kept = _former(want, where, pool)
        nodes = [name for names in kept.values() for name in names]
        for place, count in want.counts.items():
            missing = count - len(kept.get(place, ()))
            if 0 < missing <= sum(len(group.free) for group in places[place]):
                taken += (more := take(places[place], missing))
                nodes += more
        expected[want.trainer] = tuple(nodes)
    pool.put_back(taken)
    return expected


def _keep(want: Want, where: Mapping[tuple[str, float], str], pool: Pool) -> dict[str, list[str]]:
    """By place, those of a trainer's former nodes that it goes on with; they are taken out of their groups."""
    free = [name for name in want.former if (node := pool.nodes.get(name)) and name in pool.groups[key_of(node)].free]
    kept = _former(replace(want, former=free), where, pool)
    for name in (name for names in kept.values() for name in names):
        pool.groups[key_of(pool.nodes[name])].free.discard(name)
    return kept


def _former(want: Want, where: Mapping[tuple[str, float], str], pool: Pool) -> dict[str, list[str]]:
    """By place, those of a trainer's former nodes that it would keep."""
    usable: dict[str, list[tuple[float, str]]] = {}
    for name in want.former:
        node = pool.nodes.get(name)
        if node is not None and (place := where.get(key_of(node))) is not None:
            usable.setdefault(place, []).append((-key_of(node)[1], name))
    return {place: [name for _, name in sorted(nodes)[:want.counts.get(place, 0)]] for place, nodes in usable.items()}


def take(groups: Iterable[Group], count: int) -> list[str]:
    """Take ``count`` free nodes out of ``groups``, which have as many.

    From as few blocks as can be, since each block is one more way to lose the fragment: the smallest block that
    suffices, otherwise the largest ones first; within a block, whatever lasts longest, then in the order of names.
    """
    by_block: dict[str, list[Group]] = {}
    for group in groups:
        if group.free:
            by_block.setdefault(group.block, []).append(group)
    sizes = {block: sum(len(group.free) for group in several) for block, several in by_block.items()}
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
    """When the first of ``nodes`` goes, in seconds; None where no end is known."""
    end = min((key_of(pool.nodes[name])[1] for name in nodes), default=math.inf)
    return None if math.isinf(end) else end
