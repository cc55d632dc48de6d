"""The nodes there are: in which block, until when, and held by whom.

Nodes of a block that end together are interchangeable, so all but their names is counted by group. Every change
costs as much as it touches: nothing here walks over all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

GroupKey = tuple[str, float]


@dataclass(frozen=True)
class Node:
    """A node, its block, and when it goes, in seconds (None: unknown)."""

    name: str
    block: str
    until_s: float | None


@dataclass
class Group:
    """Nodes of one block that go at the same time, ``until_s`` (infinite: unknown).

    Attributes
    ----------
    total
        How many there are, busy ones included.
    free
        Those that no fragment holds.
    """

    block: str
    until_s: float
    total: int = 0
    free: set[str] = field(default_factory=set)
    # Free names in a heap, so that the first ones are found without sorting. A name that is not free any more stays in it until its turn.
    _order: list[str] = field(default_factory=list, repr=False)
    _queued: set[str] = field(default_factory=set, repr=False)

    def add(self, name: str) -> None:
        """A node is free."""
        self.free.add(name)
        if name not in self._queued:
            self._queued.add(name)
            heappush(self._order, name)

    def take(self, count: int) -> list[str]:
        """The first ``count`` free nodes by name, or all where there are fewer; they are not free any more."""
        taken: list[str] = []
        while self._order and len(taken) < count:
            name = heappop(self._order)
            self._queued.discard(name)
            if name in self.free:
                self.free.discard(name)
                taken.append(name)
        return taken


class Pool:
    """Every node there is.

    Attributes
    ----------
    nodes
        By name.
    holder
        The trainer whose fragment holds a node, by the node's name; free nodes are no keys.
    groups
        The nodes by block and end.
    busy
        How many nodes are held, by block; blocks without any are no keys.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.holder: dict[str, str] = {}
        self.groups: dict[GroupKey, Group] = {}
        self.busy: dict[str, int] = {}

    def join(self, node: Node) -> None:
        """A node is there; one that was there already keeps its holder."""
        holder = self.leave(node.name)
        self.nodes[node.name] = node
        group = self.groups.setdefault(key_of(node), Group(*key_of(node)))
        group.total += 1
        if holder is None:
            group.add(node.name)
        else:
            self._hold(node, holder)

    def leave(self, name: str) -> str | None:
        """A node is gone; who held it."""
        node = self.nodes.pop(name, None)
        if node is None:
            return None
        group = self.groups[key_of(node)]
        group.total -= 1
        group.free.discard(name)
        if not group.total:
            del self.groups[key_of(node)]
        holder = self.holder.pop(name, None)
        if holder is not None:
            self._unbusy(node.block)
        return holder

    def hold(self, names: Iterable[str], trainer: str) -> None:
        """A fragment of ``trainer`` starts on nodes that are free or have been taken out of their group."""
        for name in names:
            node = self.nodes[name]
            self.groups[key_of(node)].free.discard(name)
            self._hold(node, trainer)

    def release(self, names: Iterable[str], trainer: str) -> None:
        """A fragment has ended; those of its nodes that are still there and still its own are free."""
        for name in names:
            if self.holder.get(name) == trainer:
                node = self.nodes[name]
                del self.holder[name]
                self._unbusy(node.block)
                self.groups[key_of(node)].add(name)

    def put_back(self, names: Iterable[str]) -> None:
        """Nodes that were taken out of their group are free after all."""
        for name in names:
            self.groups[key_of(self.nodes[name])].add(name)

    def _hold(self, node: Node, trainer: str) -> None:
        self.holder[node.name] = trainer
        self.busy[node.block] = self.busy.get(node.block, 0) + 1

    def _unbusy(self, block: str) -> None:
        self.busy[block] -= 1
        if not self.busy[block]:
            del self.busy[block]


def key_of(node: Node) -> GroupKey:
    """The group that a node belongs to."""
    return node.block, math.inf if node.until_s is None else node.until_s
