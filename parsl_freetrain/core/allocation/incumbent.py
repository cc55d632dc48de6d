"""The incumbent: the allocation that keeps what runs, as far as possible.

Every new allocation is compared with it. Trainers that may not change are determined here, too.
"""

from __future__ import annotations

from parsl_freetrain.core.allocation.problem import Bid, Problem


def pinned(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Nodes in each place of the bids that have to keep what they hold.

    A fixed bid keeps it where its count is allowed and the nodes are there; of several that do not
    fit together, the first ones do.
    """
    left = [block.nodes for block in problem.places]
    kept = {}
    for bid in problem.bids:
        if not bid.fixed or not problem.can_go_on(bid):
            continue
        held = problem.held(bid)
        if all(n <= there for n, there in zip(held, left, strict=True)):
            kept[bid.name] = held
            left = [there - n for n, there in zip(held, left, strict=True)]
    return kept


def stay_put(problem: Problem) -> dict[str, tuple[int, ...]]:
    """What runs now, as far as the nodes suffice: nodes in each place, by trainer.

    In the bids' order, those that have to keep their nodes first, each keeps its nodes or the most
    that is left and that it can use; it gives up nodes of the blocks that end first, and all of
    those that it could not start on if it has to give up any.
    """
    kept = pinned(problem) if any(bid.fixed for bid in problem.bids) else {}
    left = [
        block.nodes - sum(nodes[b] for nodes in kept.values())
        for b, block in enumerate(problem.places)
    ]
    if len(left) == 1:
        return _stay_in_one(problem, kept, left[0])
    longest = sorted(range(len(left)), key=lambda b: -problem.places[b].remaining_s)
    for bid in problem.bids:
        if bid.name in kept:
            continue
        there = [min(n, rest) for n, rest in zip(problem.held(bid), left, strict=True)]
        if not problem.spans_blocks:
            best = max(longest, key=lambda b: there[b])
            there = [n if b == best else 0 for b, n in enumerate(there)]
        nodes = _most_of(bid, there, longest)
        short = problem.barred(bid)
        if short and nodes != problem.held(bid):
            nodes = _most_of(bid, [0 if b in short else n for b, n in enumerate(there)], longest)
        kept[bid.name] = nodes
        left = [rest - n for n, rest in zip(nodes, left, strict=True)]
    return kept


def _stay_in_one(
    problem: Problem, kept: dict[str, tuple[int, ...]], left: int
) -> dict[str, tuple[int, ...]]:
    for bid in problem.bids:
        if bid.name not in kept:
            count = bid.usable(min(bid.current_nodes, left))
            if count != bid.current_nodes and problem.barred(bid):
                count = 0
            kept[bid.name] = (count,)
            left -= count
    return kept


def _most_of(bid: Bid, there: list[int], longest: list[int]) -> tuple[int, ...]:
    """As many of the nodes ``there`` as the bid can use, those that stay longest first."""
    wanted = bid.usable(sum(there))
    nodes = [0] * len(there)
    for b in longest:
        nodes[b] = min(there[b], wanted)
        wanted -= nodes[b]
    return tuple(nodes)
