"""Adding up the ranks' sums along the tree of virtual shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parsl_freetrain.training.comm.peers import Peers
from parsl_freetrain.training.steps.reduction_tree import Node, ShardTree


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
