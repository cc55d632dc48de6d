"""Adding up the shards of a global batch along the tree of virtual shards, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.data.sample_order import shards_of_rank
from parsl_freetrain.training.steps.reduction_tree import Node, ShardTree
from parsl_freetrain.training.steps.shard_sum import Contribution, ShardSums


class SumOverShards:
    """The sum of the contributions of all shards, wherever they are.

    Attributes
    ----------
    mine
        The shards of this rank.
    most
        The largest number of shards of a rank.
    sizes
        Of the shards of the current global batch; sums are of shares of the largest one.
    magnitudes
        Of this rank's sums, before the sum over several ranks, which hides what is not finite.
    """

    def __init__(
        self, sums: ShardSums, peers: Peers, shards: int, speeds: Sequence[float] = ()
    ) -> None:
        self._sums, self._peers, self._tree = sums, peers, ShardTree(shards)
        ranges = [
            shards_of_rank(shards, peers.world_size, rank, speeds)
            for rank in range(peers.world_size)
        ]
        self.mine, self.most = ranges[peers.rank], max(map(len, ranges))
        self.sizes: tuple[int, ...] = ()
        self.magnitudes: list[torch.Tensor] = []
        self._covers = [self._tree.cover(shards_) for shards_ in ranges]
        self._exchange = TreeExchange(self._tree, peers)
        self._of: dict[Node, Contribution | None] = {}
        self._on_cpu: list[torch.Tensor] = []

    @property
    def first_rank(self) -> int:
        """The rank that has the first shard."""
        return next(rank for rank, cover in enumerate(self._covers) if cover)

    def begin(self, sizes: Sequence[int], nodes: Sequence[Node]) -> None:
        """A global batch begins, of which this rank has these nodes."""
        self.sizes, self._of = tuple(sizes), {}
        for node in nodes:
            if not self.has_samples(node):
                self.add(node, None)

    def has_samples(self, node: Node) -> bool:
        """Whether a shard of a node has samples."""
        return any(self.sizes[slice(*node)])

    def weight(self, part: int) -> float:
        """A shard's samples by those of the largest shard, which is 1 for most."""
        return self.sizes[part] / max(self.sizes)

    def add(self, node: Node, own: Contribution | None) -> None:
        """Add the contribution of a node of this rank; None: its shards are empty."""
        self._tree.add(self._of, node, own, self._sums.plus)

    def present(self) -> bytes:
        """By parameter, whether this rank has a gradient."""
        own = [sums.gradients for sums in self._of.values() if sums is not None]
        return bytes(any(g[i] is not None for g in own) for i in range(len(self._sums.parameters)))

    def total(self, present: Sequence[bool]) -> Contribution:
        """The mean over all samples, on all ranks, which call this together. ``present``: the
        parameters that have a gradient on any of them.
        """
        sums, peers = self._sums, self._peers
        mine = {node: own for node, own in self._of.items() if own is not None}
        self.magnitudes = []
        if peers.world_size == 1:
            total = self._tree.total(self._of, sums.plus)
            assert total is not None
        else:
            self.magnitudes = [sums.magnitude(own) for own in mine.values()]
            nodes = [list(filter(self.has_samples, cover)) for cover in self._covers]
            empty = [n for cover in self._covers for n in cover if not self.has_samples(n)]
            flats = {node: sums.pack(own) for node, own in mine.items()}
            into = next(iter(flats.values())) if flats else sums.memory().tensor
            if peers.exchanges_on_cpu and into.device.type != 'cpu':
                # One copy each way. An addition has the same bits on every device.
                here = dict(zip(flats, self._copies(list(flats.values()) or [into]), strict=False))
                self._exchange.add_up(here, nodes, empty, self._on_cpu[0])
                into.copy_(self._on_cpu[0])
            else:
                self._exchange.add_up(flats, nodes, empty, into)
            for own in list(mine.values())[1:]:
                sums.release(own)
            total = sums.unpack(into, present)
        self._of = {}
        sums.scale(total, max(self.sizes) / sum(self.sizes))
        return total

    def _copies(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in page-locked memory, which is used again: copies from and to other memory take
        many times as long.
        """
        while len(self._on_cpu) < len(flats):
            here = torch.empty_like(flats[0], device='cpu', pin_memory=True)
            self._on_cpu.append(here)
        for here, flat in zip(self._on_cpu, flats, strict=False):
            here.copy_(flat)
        return self._on_cpu[: len(flats)]


class TreeExchange:
    """Adds up sums of all ranks, step by step, and uses the same memory again.

    Each rank adds up one slice of all sums, and the slices are put together. So a rank with one
    node sends and receives about twice its sum, whatever the number of ranks.
    """

    def __init__(self, tree: ShardTree, peers: Peers) -> None:
        self._tree, self._peers = tree, peers
        self._received = torch.empty(0)

    def add_up(
        self,
        mine: Mapping[Node, torch.Tensor],
        nodes: Sequence[Sequence[Node]],
        empty: Sequence[Node],
        into: torch.Tensor,
    ) -> None:
        """The sum over all shards, in the order of the tree, on all ranks.

        Parameters
        ----------
        mine
            This rank's sums, flat and of the same length, a multiple of the number of ranks.
        nodes
            By rank, the nodes whose sums it has.
        empty
            Nodes without samples.
        into
            Gets the result; it may be one of the sums.
        """
        peers, ranks = self._peers, self._peers.world_size
        own = [mine[node].view(ranks, -1) for node in nodes[peers.rank]]
        each = into.numel() // ranks
        sent = torch.stack(own, 1) if len(own) > 1 else own[0] if own else into.new_empty(0)
        count = sum(map(len, nodes)) * each
        if self._received.numel() < count:
            self._received = into.new_empty(count)
        received = self._received[:count]
        peers.all_to_all(
            sent.view(-1),
            [len(own) * each] * ranks,
            [len(theirs) * each for theirs in nodes],
            received,
        )
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
