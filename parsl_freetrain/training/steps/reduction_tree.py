"""Sums over virtual shards along a fixed binary tree over their numbers, whatever the number of
ranks. A rank adds up whole subtrees by itself and sends only their sums.
"""

import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from parsl_freetrain.training.checkpoint.transport_memory import lock_pages, memory_file
from parsl_freetrain.training.comm.collectives import on_cpu
from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.data.sample_order import shards_of_rank
from parsl_freetrain.training.steps.bit_sums import bit_sums
from parsl_freetrain.training.steps.shard_sum import Contribution, ShardSums

_BOOT_ID = Path('/proc/sys/kernel/random/boot_id')
_MOST = 256  # bytes of what a rank tells of its memory
_Told = tuple[str, int, int, int, int]
"""The computer, the process, its file in memory, and device and inode of that."""


class SharedRows:
    """``rows``: by rank, a flat tensor for all; page-locked if ``device`` copies faster then."""

    def __init__(self, rows: list[torch.Tensor], device: torch.device) -> None:
        self.rows = rows
        if device.type == 'cuda':
            for unlock in map(lock_pages, filter(torch.Tensor.numel, rows)):
                if unlock is not None:
                    weakref.finalize(self, unlock).atexit = False


def share(
    peers: Peers, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> SharedRows | None:
    """Memory for so many elements of each rank; None if too little, or not on one computer."""
    own, told = -1, b''
    try:
        own, kept = memory_file(max(sizes[peers.rank] * dtype.itemsize, 1))
        is_it = os.fstat(own)
        here = _BOOT_ID.read_text(), os.getpid(), own, is_it.st_dev, is_it.st_ino
        told = msgspec.msgpack.encode(here)
    except OSError:
        kept = memoryview(b'')
    rows: list[torch.Tensor] = []
    try:
        each = zip(gather_bytes(peers, told, _MOST), sizes, strict=True)
        for rank, (said, size) in enumerate(each):
            length = max(size * dtype.itemsize, 1)
            content = kept if rank == peers.rank else _map(said, length)
            rows.append(torch.frombuffer(content, dtype=torch.uint8)[: size * dtype.itemsize])
    except (OSError, msgspec.DecodeError):
        rows = []
    everywhere = all(found == b'\1' for found in gather_bytes(peers, bytes([bool(rows)]), 1))
    if own >= 0:
        os.close(own)
    return SharedRows([row.view(dtype) for row in rows], device) if everywhere else None


def _map(said: bytes, length: int) -> mmap.mmap:
    boot_id, pid, number, *is_it = msgspec.msgpack.decode(said, type=_Told)
    if boot_id != _BOOT_ID.read_text():
        raise OSError('another computer')
    fd = os.open(f'/proc/{pid}/fd/{number}', os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if [found.st_dev, found.st_ino] != is_it:  # in a container, processes have other numbers
            raise OSError('another process')
        return mmap.mmap(fd, length)
    finally:
        os.close(fd)


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
        """Add a node's sum (None: empty shards), and every parent whose parts are complete."""
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


class SumOverShards:
    """The sum over all shards. ``mine``: this rank's; ``most``: the largest number of a rank.
    ``sizes``: of the global batch's shards. ``spoilt``: 0 if the last sum was finite; ``bad``: of
    this rank's, before. ``looks``: take ``digests`` of the gradients of this rank's nodes.
    """

    def __init__(
        self, sums: ShardSums, peers: Peers, shards: int, speeds: Sequence[float] = ()
    ) -> None:
        self._sums, self._peers, self._tree = sums, peers, ShardTree(shards)
        ranks = range(peers.world_size)
        ranges = [shards_of_rank(shards, len(ranks), rank, speeds) for rank in ranks]
        self.mine, self.most = ranges[peers.rank], max(map(len, ranges))
        self.sizes: tuple[int, ...] = ()
        self.bad: list[torch.Tensor] = []
        self.spoilt = torch.empty(0)
        self.looks = False
        self.digests: dict[Node, torch.Tensor] = {}
        self._covers = [self._tree.cover(shards_) for shards_ in ranges]
        self.first_rank = next(rank for rank, cover in enumerate(self._covers) if cover)
        self._of: dict[Node, Contribution | None] = {}
        self._received = torch.empty(0)
        self._shared: SharedRows | None = None
        self._asked = False

    def begin(self, sizes: Sequence[int], nodes: Sequence[Node], *, looks: bool) -> None:
        """A global batch begins, of which this rank has these nodes."""
        self.sizes, self._of = tuple(sizes), {}
        self.looks, self.digests = looks, {}
        for node in nodes:
            if not self.has_samples(node):
                self.add(node, None)

    def has_samples(self, node: Node) -> bool:
        return any(self.sizes[slice(*node)])

    def weight(self, part: int) -> float:
        """A shard's samples by those of the largest shard, which is 1 for most."""
        return self.sizes[part] / max(self.sizes)

    @property
    def whole(self) -> float:
        return sum(self.sizes) / max(self.sizes)

    def add(self, node: Node, own: Contribution | None) -> None:
        """Add the contribution of a node of this rank; None: its shards are empty."""
        if self.looks:
            self.look({node: own})  # before it is added to its neighbour
        self._tree.add(self._of, node, own, self._sums.plus)
        if self.looks:
            self.look(self._of)

    def look(self, sums: Mapping[Node, Contribution | None] | None = None) -> None:
        for node, own in (self._of if sums is None else sums).items():
            if own is not None:
                self.digests[node] = bit_sums(own.gradients, self._sums.parameters[0].device)

    def present(self) -> bytes:
        """By parameter, whether this rank has a gradient."""
        own = [sums.gradients for sums in self._of.values() if sums is not None]
        return bytes(any(g[i] is not None for g in own) for i in range(len(self._sums.parameters)))

    def total(self, present: Sequence[int]) -> Contribution:
        """The mean over all samples, on all ranks together; ``present``: gradients that any has."""
        sums, peers = self._sums, self._peers
        all_of_mine = self._of
        mine = {node: own for node, own in all_of_mine.items() if own is not None}
        # For a look if a rank is lost: of these an exchange changes nothing.
        self._of = {node: own for node, own in mine.items() if own.flat is None}
        self.bad = []
        if peers.world_size == 1:
            total = self._tree.total(all_of_mine, sums.plus)
            assert total is not None
        else:
            self.bad = [sums.scale(own.present) for own in mine.values()]
            flats = {node: sums.pack(own) for node, own in mine.items()}
            whole = next(iter(flats.values())) if flats else sums.memory()
            of_nodes = {node: flat.tensor for node, flat in flats.items()}
            # On a device's ranks, one copy each way. Additions have the same bits everywhere.
            if (rows := self._rows_of(whole.tensor)) is not None:
                self._add_in_place(rows, of_nodes, whole.tensor)
            else:
                with on_cpu(whole.tensor, peers.exchanges_on_cpu) as here:
                    self._exchange({n: f.to(here.device) for n, f in of_nodes.items()}, here)
            for own in list(mine.values())[1:]:
                sums.release(own)
            total = sums.unpack(whole, present)
        self._of = {}
        self.spoilt = sums.mean(total, max(self.sizes) / sum(self.sizes))
        return total

    def _rows_of(self, flat: torch.Tensor) -> dict[Node, torch.Tensor] | None:
        """By node, memory for its sum that all ranks share; None: they are on several computers."""
        if not self._asked and self._peers.exchanges_on_cpu:
            sizes = [len(cover) * flat.numel() for cover in self._covers]
            self._shared = share(self._peers, sizes, flat.dtype, flat.device)
        self._asked = True
        if self._shared is None:
            return None
        each = zip(self._covers, self._shared.rows, strict=True)
        parts = ((cover, row.split(flat.numel())) for cover, row in each if cover)
        return {node: part for both in parts for node, part in zip(*both, strict=True)}

    def _add_in_place(
        self,
        rows: Mapping[Node, torch.Tensor],
        mine: Mapping[Node, torch.Tensor],
        into: torch.Tensor,
    ) -> None:
        """As :meth:`_exchange`. The memory is free: ranks have met since the last step."""
        ranks, rank = self._peers.world_size, self._peers.rank
        sign = torch.zeros(1, device='cpu')
        for node, flat in mine.items():
            rows[node].copy_(flat)
        self._peers.all_gather(sign)
        there = {
            n: r.view(ranks, -1)[rank] if self.has_samples(n) else None for n, r in rows.items()
        }
        self._tree.total(there, torch.Tensor.add_)
        self._peers.all_gather(sign)
        into.copy_(rows[min(filter(self.has_samples, rows))])

    def _exchange(self, mine: Mapping[Node, torch.Tensor], into: torch.Tensor) -> None:
        """Add up the flat sums of all ranks' nodes in the tree's order into ``into``, which may be
        one of this rank's own. Each rank adds up one slice of all sums; with one node it sends and
        receives about twice its sum, whatever the number of ranks.
        """
        peers, ranks = self._peers, self._peers.world_size
        nodes = [list(filter(self.has_samples, cover)) for cover in self._covers]
        empty = [n for cover in self._covers for n in cover if not self.has_samples(n)]
        own = [mine[node].view(ranks, -1) for node in nodes[peers.rank]]
        each = into.numel() // ranks
        sent = torch.stack(own, 1) if len(own) > 1 else own[0] if own else into.new_empty(0)
        count = sum(map(len, nodes)) * each
        if self._received.numel() < count:
            self._received = into.new_empty(count)
        received = self._received[:count]
        sizes = [len(own) * each] * ranks, [len(theirs) * each for theirs in nodes]
        peers.all_to_all(sent.view(-1), *sizes, received)
        in_order = [node for theirs in nodes for node in theirs]
        sums: dict[Node, torch.Tensor | None] = {
            **dict.fromkeys(empty),
            **dict(zip(in_order, received.view(-1, each), strict=True)),
        }
        total = self._tree.total(sums, torch.Tensor.add_)
        assert total is not None
        rows = into.view(ranks, each)
        rows[peers.rank] = total
        peers.all_gather_into_tensor(rows)
