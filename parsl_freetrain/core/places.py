"""Where nodes can be given away: the blocks of an allocation problem, and which of the pool's groups each one consists of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parsl_freetrain.core.allocation import Block
from parsl_freetrain.core.pool import Group, GroupKey
from parsl_freetrain.core.state import ControllerState

EVERYWHERE = ''
LASTING = 'lasting'


@dataclass(frozen=True)
class Places:
    """The nodes worth giving away, as a problem sees them.

    Attributes
    ----------
    nodes
        How many there are.
    blocks
        As of :class:`~parsl_freetrain.core.allocation.Problem`; empty where counts alone matter.
    groups
        The groups of the pool of which each place consists, by the place's name.
    layout
        Equal for two of these if every node belongs to a place of the same index in both.
    """

    nodes: int
    blocks: tuple[Block, ...]
    groups: dict[str, list[Group]]
    layout: tuple[object, ...]
    _index: dict[GroupKey, int]

    def held(self, keys: Sequence[GroupKey]) -> tuple[int, ...]:
        """How many of these nodes, told by their groups, are in each of the blocks."""
        counts = [0] * len(self.blocks)
        for key in keys:
            counts[self._index[key]] += 1
        return tuple(counts)


def places_of(state: ControllerState, at: float, horizon_s: float, min_hole_s: float, spans_blocks: bool) -> Places:
    """The places of now.

    Left out are nodes that go within ``min_hole_s`` and those that a cancelled trainer still holds. Where fragments may span
    blocks, nodes that go at the same time within the horizon are one place, and all that stay for the horizon
    another. Where they may not, each block is a place, which ends when the first of its nodes goes.
    """
    groups = [group for group in state.pool.groups.values() if group.until_s - at >= min_hole_s]
    leaving = state.leaving()
    if spans_blocks:
        ends = sorted({group.until_s for group in groups if group.until_s - at < horizon_s})
        if not ends:
            nodes = sum(group.total for group in groups) - sum(leaving.get((g.block, g.until_s), 0) for g in groups if leaving)
            return Places(nodes, (), {EVERYWHERE: groups}, (), {})
        names = {end: f'until {end:.3f}' for end in ends}
        blocks = [*(Block(names[end], 0, end - at) for end in ends), Block(LASTING, 0)]
        of = {(g.block, g.until_s): names.get(g.until_s, LASTING) for g in groups}
        layout: tuple[object, ...] = tuple(ends)
    else:
        ends_of: dict[str, float] = {}
        for group in groups:
            ends_of[group.block] = min(group.until_s, ends_of.get(group.block, math.inf))
        blocks = [Block(block, 0, end - at if end - at < horizon_s else math.inf) for block, end in sorted(ends_of.items())]
        of = {(g.block, g.until_s): g.block for g in groups}
        layout = tuple(sorted(ends_of))
    return _counted(groups, blocks, of, leaving, layout)


def _counted(groups: list[Group], blocks: list[Block], of: dict[GroupKey, str], leaving: dict[GroupKey, int],
             layout: tuple[object, ...]) -> Places:
    counts = dict.fromkeys((block.name for block in blocks), 0)
    members: dict[str, list[Group]] = {block.name: [] for block in blocks}
    for group in groups:
        key = (group.block, group.until_s)
        counts[of[key]] += group.total - leaving.get(key, 0)
        members[of[key]].append(group)
    place = {block.name: i for i, block in enumerate(blocks)}
    return Places(sum(counts.values()), tuple(replace(block, nodes=counts[block.name]) for block in blocks), members, layout,
                  {key: place[name] for key, name in of.items()})
