"""The speed of a trainer on nodes of several classes at once.

Each node is as fast as one of as many nodes of its own class. Batches consist of a number of equal
parts, which are dealt to the nodes by speed; who is done last sets the pace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from parsl_freetrain.core.model.shards_by_speed import rate_together

if TYPE_CHECKING:
    from parsl_freetrain.core.allocation.problem import Bid


def mixed_rate(bid: Bid, nodes: Iterable[tuple[str, int]]) -> float:
    """Value per second of nodes to a bid that has ``mixed_parts``. Of more nodes than it can use,
    it uses the fastest. ``nodes``: a class and a number of nodes, in turn.
    """
    there = [(name, count) for name, count in nodes if count]
    left = used = bid.usable(sum(count for _, count in there))
    workers = []
    for rate, count in sorted(
        ((bid.curve_on(name).rate_at(used), count) for name, count in there), reverse=True
    ):
        if rate > 0 and left:
            workers.append((rate / used, min(count, left)))
            left -= min(count, left)
    return rate_together(bid.mixed_parts, tuple(workers)) if workers else 0.0
