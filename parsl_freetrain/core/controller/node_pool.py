"""The available nodes: the block of each, when it leaves, who holds it; in groups alike."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

GroupKey = tuple[str, float, str]


@dataclass(frozen=True)
class PoolNode:
    """A node, its block and end (None: unknown), class, host (empty: its name), and start."""

    name: str
    block: str
    until_s: float | None
    node_class: str = ''
    host: str = ''
    since_s: float = 0.0


@dataclass
class Group:
    """Nodes of a block and class that leave at ``until_s`` (or infinite): all, and free ones."""

    block: str
    until_s: float
    node_class: str = ''
    total: int = 0
    free: set[str] = field(default_factory=set)
    # A heap of free names; others stay in it until they reach the top.
    _order: list[str] = field(default_factory=list, repr=False)
    _queued: set[str] = field(default_factory=set, repr=False)

    @property
    def key(self) -> GroupKey:
        return self.block, self.until_s, self.node_class

    def add(self, name: str) -> None:
        self.free.add(name)
        if name not in self._queued:
            self._queued.add(name)
            heappush(self._order, name)

    def take(self, count: int) -> list[str]:
        """Take the first ``count`` free nodes by name, or all if there are fewer."""
        taken: list[str] = []
        while self._order and len(taken) < count:
            name = heappop(self._order)
            self._queued.discard(name)
            if name in self.free:
                self.free.discard(name)
                taken.append(name)
        return taken


class Pool:
    def __init__(self) -> None:
        self.nodes: dict[str, PoolNode] = {}
        self.holder: dict[str, str] = {}  # the trainer of each node; free ones are missing
        self.groups: dict[GroupKey, Group] = {}  # the nodes by block, end and class
        self.busy: dict[str, int] = {}  # held nodes by block; blocks without any are missing

    def join(self, node: PoolNode) -> None:
        """Add a node; a node that was there already keeps its holder."""
        holder = self.leave(node.name)
        self.nodes[node.name] = node
        group = self.groups.setdefault(key_of(node), Group(*key_of(node)))
        group.total += 1
        if holder is None:
            group.add(node.name)
        else:
            self._hold(node, holder)

    def leave(self, name: str) -> str | None:
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
        """Record that a fragment starts on nodes that are free or taken out of their group."""
        for name in names:
            node = self.nodes[name]
            self.groups[key_of(node)].free.discard(name)
            self._hold(node, trainer)

    def release(self, names: Iterable[str], trainer: str) -> None:
        for name in names:
            if self.holder.get(name) == trainer:
                node = self.nodes[name]
                del self.holder[name]
                self._unbusy(node.block)
                self.groups[key_of(node)].add(name)

    def put_back(self, names: Iterable[str]) -> None:
        """Free nodes that were taken out of their group but not used."""
        for name in names:
            self.groups[key_of(self.nodes[name])].add(name)

    def _hold(self, node: PoolNode, trainer: str) -> None:
        self.holder[node.name] = trainer
        self.busy[node.block] = self.busy.get(node.block, 0) + 1

    def _unbusy(self, block: str) -> None:
        self.busy[block] -= 1
        if not self.busy[block]:
            del self.busy[block]


def key_of(node: PoolNode) -> GroupKey:
    return node.block, math.inf if node.until_s is None else node.until_s, node.node_class
