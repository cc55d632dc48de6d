"""Adding up the ranks' sums along the tree of virtual shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from parsl_freetrain.training.comm.collectives import Peers
from parsl_freetrain.training.steps.reduction_tree import Node, ShardTree


def total_of_ranks(
    mine: Mapping[Node, torch.Tensor],
    nodes: Sequence[Sequence[Node]],
    empty: Sequence[Node],
    like: torch.Tensor,
    tree: ShardTree,
    peers: Peers,
) -> torch.Tensor:
    """The sum over all shards, in the order of the tree, on all ranks.

    Each rank adds up one slice of all sums, and the slices are put together. So a rank with one
    node sends and receives about twice its sum, whatever the number of ranks.

    Parameters
    ----------
    mine
        This rank's sums, flat and of the same length.
    nodes
        By rank, the nodes whose sums it has.
    empty
        Nodes without samples.
    like
        A tensor of the length, type and device of the sums.
    """
    ranks = peers.world_size
    each = -(-like.numel() // ranks)
    sent = like.new_empty(ranks, len(mine), each)
    for i, node in enumerate(nodes[peers.rank]):
        for rank, to in enumerate(sent[:, i]):
            part = mine[node][rank * each : (rank + 1) * each]
            to[: len(part)] = part
            to[len(part) :].zero_()
    slices = peers.all_to_all(
        sent.view(-1), [len(mine) * each] * ranks, [len(theirs) * each for theirs in nodes]
    ).view(-1, each)
    in_order = [node for theirs in nodes for node in theirs]
    sums: dict[Node, torch.Tensor | None] = {
        **dict.fromkeys(empty),
        **dict(zip(in_order, slices, strict=True)),
    }
    total = tree.total(sums, torch.Tensor.add_)
    assert total is not None
    return peers.gather(total).view(-1)[: like.numel()]
