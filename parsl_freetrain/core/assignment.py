"""Which nodes, once it is known how many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FreeNode:
    """A node without a fragment: its block and when it goes (None: unknown)."""

    name: str
    block: str
    until_s: float | None


def pick_nodes(free: Mapping[str, FreeNode], count: int, spans_blocks: bool) -> tuple[str, ...]:
    """Choose ``count`` of the free nodes; the same question always has the same answer.

    From as few blocks as can be, since each block is one more way to lose the fragment: the
    smallest block that suffices, otherwise the largest ones first; within a block, whatever lasts longest.

    Returns
    -------
    tuple of str
        ``count`` names; empty if there are not enough (in one block, where ``spans_blocks`` is False).
    """
    by_block: dict[str, list[FreeNode]] = {}
    for node in free.values():
        by_block.setdefault(node.block, []).append(node)
    for nodes in by_block.values():
        nodes.sort(key=lambda node: (-(math.inf if node.until_s is None else node.until_s), node.name))
    sufficient = [block for block, nodes in by_block.items() if len(nodes) >= count]
    if sufficient:
        block = min(sufficient, key=lambda b: (len(by_block[b]), b))
        return tuple(node.name for node in by_block[block][:count])
    if not spans_blocks or sum(map(len, by_block.values())) < count:
        return ()
    picked: list[str] = []
    for block in sorted(by_block, key=lambda b: (-len(by_block[b]), b)):
        picked += [node.name for node in by_block[block][:count - len(picked)]]
    return tuple(picked)
