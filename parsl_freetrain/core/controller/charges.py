"""The charge budget: what blocks have cost, and how many nodes can still be paid."""

from __future__ import annotations

import math
from collections.abc import Iterable

from parsl_freetrain.core.model.types import BlockRequest, Hole


class Charges:
    """What the machine's accounts are charged for blocks, in their own unit.

    An open block counts with all that it can cost, so that the budget is never exceeded. One that
    is over counts with what it has cost at most: from the earliest time at which it may have got
    its nodes.

    Parameters
    ----------
    limit
        The budget; None: there is none.
    before
        What earlier runs were charged.
    """

    def __init__(self, limit: float | None, before: float) -> None:
        self.limit = math.inf if limit is None else limit
        self.charged = before

    def ended(self, request: BlockRequest, begun_s: float | None, at: float) -> None:
        """A block is over, or waits in the queue again; ``begun_s``: None if it had no nodes."""
        if begun_s is not None:
            lasted_s = min(max(at - begun_s, 0.0), request.lasts_s)
            self.charged += request.charge.cost(request.nodes, lasted_s)

    def left(self, open_blocks: Iterable[BlockRequest]) -> float:
        """What is left if every open block lasts as long as it can."""
        if self.limit == math.inf:
            return math.inf
        may_cost = sum(block.charge.cost(block.nodes, block.lasts_s) for block in open_blocks)
        return self.limit - self.charged - may_cost

    def too_dear(self, holes: Iterable[Hole], least: float, at: float) -> str:
        """Why no block can be paid if none is open, as a clause for a message; empty if one can.

        Parameters
        ----------
        holes
            Those that are long enough.
        least
            Number of nodes of the smallest block that is of use.
        """
        costs = [
            (hole.charge.cost(int(least), hole.lasts_s(at)), hole.lasts_s(at))
            for hole in holes
            if hole.nodes >= least
        ]
        if self.limit == math.inf or not costs or self.limit - self.charged >= min(costs)[0]:
            return ''
        cost, lasts_s = min(costs)
        return (
            f'{self.charged:.6g} of charge_budget={self.limit:.6g} are charged, and the cheapest '
            f'block that can be had ({least:g} nodes for {lasts_s:.0f} s) may cost {cost:.6g}; '
            'raise the budget, or make blocks shorter (longest_s), and run the program again to '
            'go on from the last checkpoint'
        )


def affordable(hole: Hole, left: float, at: float) -> int:
    """The number of a hole's nodes that can be paid."""
    each = hole.charge.cost(1, hole.lasts_s(at))
    if each <= 0 or hole.nodes * each <= left:
        return hole.nodes
    # A little more than is left is no more than an error of floats.
    return max(0, math.floor(left / each + 1e-9))
