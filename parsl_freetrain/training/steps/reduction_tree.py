"""Sums over virtual shards, in an order that does not depend on the number of ranks.

Floating point sums depend on the order of addition. Here the order is a fixed binary tree over the
shards' numbers. A rank with several neighbouring shards adds up whole subtrees by itself and sends
only their sums. So each rank sends little more than one contribution, whatever the number of
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

Node = tuple[int, int]  # the shards first .. last - 1
T = TypeVar('T')


class ShardTree:
    """The tree over ``shards`` shards; a node is a range of shards."""

    def __init__(self, shards: int) -> None:
        self.root: Node = (0, shards)
        self._parts: dict[Node, tuple[Node, Node]] = {}
        self._parent: dict[Node, Node] = {}
        self._split(self.root)

    def cover(self, shards: range) -> tuple[Node, ...]:
        """The minimum set of nodes that together are exactly these shards, in order."""
        return tuple(self._cover(self.root, shards))

    def add(
        self, sums: dict[Node, T | None], node: Node, value: T | None, plus: Callable[[T, T], T]
    ) -> None:
        """Add one node's sum, and then every parent whose parts are now complete.

        Parameters
        ----------
        sums
            The sums so far; it is changed.
        node
            The node that ``value`` belongs to.
        value
            The sum; None: the node's shards are empty.
        plus
            Adds the sum of later shards to that of earlier ones.
        """
        sums[node] = value
        while node in self._parent:
            parent = self._parent[node]
            left, right = self._parts[parent]
            if left not in sums or right not in sums:
                return
            a, b = sums.pop(left), sums.pop(right)
            sums[parent] = b if a is None else a if b is None else plus(a, b)
            node = parent

    def total(self, sums: Mapping[Node, T | None], plus: Callable[[T, T], T]) -> T | None:
        """The sum over all shards, given sums that cover them; None if all are empty."""
        found: dict[Node, T | None] = {}
        for node in sorted(sums):
            self.add(found, node, sums[node], plus)
        return found[self.root]

    def _split(self, node: Node) -> None:
        first, last = node
        if last - first < 2:
            return
        middle = first + (1 << ((last - first - 1).bit_length() - 1))
        self._parts[node] = (first, middle), (middle, last)
        for part in self._parts[node]:
            self._parent[part] = node
            self._split(part)

    def _cover(self, node: Node, shards: range) -> list[Node]:
        first, last = node
        if last <= shards.start or first >= shards.stop:
            return []
        if shards.start <= first and last <= shards.stop:
            return [node]
        left, right = self._parts[node]
        return self._cover(left, shards) + self._cover(right, shards)
