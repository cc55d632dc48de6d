"""The blocks of the allocation problem, and the node groups in each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parsl_freetrain.core.allocation.problem import Capacity
from parsl_freetrain.core.controller.controller_state import ControllerState
from parsl_freetrain.core.controller.node_pool import Group, GroupKey

EVERYWHERE = ''
LASTING = 'lasting'


@dataclass(frozen=True)
class Places:
    nodes: int
    blocks: tuple[Capacity, ...]  # as in Problem; empty if only counts matter
    groups: dict[str, list[Group]]  # of the pool, by place
    layout: tuple[object, ...]  # equal where every node has the same place index
    _index: dict[GroupKey, int]

    def held(self, keys: Sequence[GroupKey]) -> tuple[int, ...]:
        counts = [0] * len(self.blocks)
        for key in keys:
            counts[self._index[key]] += 1
        return tuple(counts)


def places_of(
    state: ControllerState, at: float, horizon_s: float, min_hole_s: float, spans_blocks: bool
) -> Places:
    """The present places.

    Nodes that leave within ``min_hole_s`` or that a cancelled trainer still holds are left out. If
    fragments may span blocks, nodes of one class that leave at the same time within the horizon
    form one place, and all nodes of a class that stay for the horizon another. Otherwise the nodes
    of each class of each block are a place, which ends when the first of them leaves.
    """
    groups = [group for group in state.pool.groups.values() if group.until_s - at >= min_hole_s]
    leaving = state.leaving()
    if spans_blocks:
        ends = sorted({group.until_s for group in groups if group.until_s - at < horizon_s})
        classes = sorted({group.node_class for group in groups})
        if not ends and not any(classes):
            held = sum(leaving.get(group.key, 0) for group in groups if leaving)
            nodes = sum(group.total for group in groups) - held
            return Places(nodes, (), {EVERYWHERE: groups}, (), {})
        names = {end: f'until {end:.3f}' for end in ends}
        named = [*names.items(), (math.inf, LASTING)]
        at_end = [(node_class, end, name) for node_class in classes for end, name in named]
        blocks = [Capacity(_name(name, k), 0, end - at, k) for k, end, name in at_end]
        of = {g.key: _name(names.get(g.until_s, LASTING), g.node_class) for g in groups}
        layout: tuple[object, ...] = (*ends, *classes)
    else:
        ends_of: dict[tuple[str, str], float] = {}
        for group in groups:
            key = group.block, group.node_class
            ends_of[key] = min(group.until_s, ends_of.get(key, math.inf))
        left = [(key, end - at) for key, end in sorted(ends_of.items())]
        blocks = [Capacity(_name(*k), 0, s if s < horizon_s else math.inf, k[1]) for k, s in left]
        of = {g.key: _name(g.block, g.node_class) for g in groups}
        layout = tuple(sorted(ends_of))
    return _counted(groups, blocks, of, leaving, layout)


def _name(name: str, node_class: str) -> str:
    return f'{name} on {node_class}' if node_class else name


def _counted(
    groups: list[Group],
    blocks: list[Capacity],
    of: dict[GroupKey, str],
    leaving: dict[GroupKey, int],
    layout: tuple[object, ...],
) -> Places:
    counts = dict.fromkeys((block.name for block in blocks), 0)
    members: dict[str, list[Group]] = {block.name: [] for block in blocks}
    for group in groups:
        counts[of[group.key]] += group.total - leaving.get(group.key, 0)
        members[of[group.key]].append(group)
    place = {block.name: i for i, block in enumerate(blocks)}
    counted = tuple(replace(block, nodes=counts[block.name]) for block in blocks)
    of_group = {key: place[name] for key, name in of.items()}
    return Places(sum(counts.values()), counted, members, layout, of_group)
