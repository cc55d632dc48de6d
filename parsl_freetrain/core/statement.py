"""An allocation problem as a document: the form in which users state one, see ``freetrain allocate``."""

from __future__ import annotations

import math
from typing import Any

from parsl_freetrain.core.allocation import Bid, Problem
from parsl_freetrain.core.limits import OWNERS

LARGEST = 20_000
"""Problems whose curves have more points than this in all are not written down."""


def stated(problem: Problem) -> dict[str, Any] | None:
    """The problem, as JSON can hold it; solving what ``freetrain allocate`` reads from it gives the same answer.

    What trainers are worth has been worked out already, so it stands there as their rate, and the objective is 'throughput'.

    Returns
    -------
    dict or None
        None if it is too large, or has limits that users cannot state.
    """
    if sum(len(bid.curve.nodes) for bid in problem.bids) > LARGEST:
        return None
    document: dict[str, Any] = {'horizon_s': problem.horizon_s, 'trainers': [_trainer(problem, bid) for bid in problem.bids]}
    if any(bid.fixed for bid in problem.bids):
        document['min_rescale_interval_s'] = 1.0
    if problem.blocks:
        document['blocks'] = [{'id': block.name, 'nodes': block.nodes, **({} if math.isinf(block.remaining_s) else {
            'remaining_s': max(0.0, block.remaining_s)})} for block in problem.blocks]
        document['spans_blocks'] = problem.spans_blocks
    else:
        document['nodes'] = problem.nodes
    for limit in problem.limits:
        what, _, owner = limit.why.partition(' ')
        if limit.least or limit.most is None or limit.node_s is not None or (limit.members and what not in OWNERS):
            return None
        if limit.members:
            document.setdefault(f'{what}_nodes', {})[owner] = limit.most
            for trainer in document['trainers']:
                if trainer['name'] in limit.members:
                    trainer[what] = owner
        elif limit.why == 'nodes kept free':
            document['keep_free'] = problem.nodes - limit.most
        else:
            document['max_nodes'] = min(limit.most, document.get('max_nodes', limit.most))
    return document


def _trainer(problem: Problem, bid: Bid) -> dict[str, Any]:
    document: dict[str, Any] = {
        'name': bid.name, 'min_nodes': bid.min_nodes, 'max_nodes': bid.max_nodes, 'rescale_up_s': bid.rescale_up_s,
        'rescale_down_s': bid.rescale_down_s, 'nodes': list(bid.curve.nodes), 'rate': list(bid.curve.rate)}
    if problem.blocks:
        held = problem.held(bid)
        document['current'] = {block.name: count for block, count in zip(problem.blocks, held, strict=True) if count}
    else:
        document['current_nodes'] = bid.current_nodes
    if bid.sizes:
        document['sizes'] = list(bid.sizes)
    if problem.too_short(bid):
        document['shortest_s'] = bid.shortest_s
    if bid.fixed:
        document['since_rescale_s'] = 0.0
    return document
