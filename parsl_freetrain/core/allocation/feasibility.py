"""The rules of a problem: which allocations keep them, and what runs kept as far as possible."""

from collections.abc import Mapping, Sequence

from parsl_freetrain.core.allocation.problem import Answer, Bid, Limit, Problem


def by_place(problem: Problem, answer: Answer) -> dict[str, tuple[int, ...]]:
    if not problem.blocks:
        return {name: (count,) for name, count in answer.allocation.items()}
    names, every = [block.name for block in problem.blocks], answer.by_block.items()
    return {name: tuple(blocks.get(one, 0) for one in names) for name, blocks in every}


def is_allowed(problem: Problem, allocation: Mapping[str, Sequence[int]]) -> bool:
    """Whether an allocation (nodes in each place, by trainer) keeps all rules of the problem."""
    keep = pinned(problem)
    if set(allocation) != {bid.name for bid in problem.bids}:
        return False
    for bid in problem.bids:
        nodes, held = tuple(allocation[bid.name]), problem.held(bid)
        if len(nodes) != len(problem.places) or min(nodes) < 0:
            return False
        if sum(nodes) and bid.usable(sum(nodes)) != sum(nodes):
            return False
        if not problem.spans_blocks and sum(1 for n in nodes if n) > 1:
            return False
        if len(problem.classes_of(nodes)) > 1 and not bid.mixed_parts:
            return False
        if nodes != held and any(nodes[b] for b in problem.barred(bid)):
            return False
        if keep.get(bid.name, nodes) != nodes:
            return False
    used = [sum(nodes[b] for nodes in allocation.values()) for b in range(len(problem.places))]
    fits = all(n <= block.nodes for n, block in zip(used, problem.places, strict=True))
    return fits and all(_keeps(problem, limit, allocation) for limit in problem.limits)


def _keeps(problem: Problem, limit: Limit, allocation: Mapping[str, Sequence[int]]) -> bool:
    members = [counts for name, counts in allocation.items() if limit.concerns(name)]
    nodes = sum(map(sum, members))
    node_s = sum(n * s for counts in members for n, s in zip(counts, problem.seconds, strict=True))
    if nodes < limit.least or (limit.most is not None and nodes > limit.most):
        return False
    # A count times seconds is exact to the last bit only in the sum's own order.
    return limit.node_s is None or node_s <= limit.node_s + 1e-9 * max(1.0, abs(limit.node_s))


def pinned(problem: Problem) -> dict[str, tuple[int, ...]]:
    """What fixed bids must keep by place, if allowed; of those that do not fit, the first."""
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
    """What runs, as far as nodes suffice: pinned bids first; what ends first is given up first."""
    kept = pinned(problem) if any(bid.fixed for bid in problem.bids) else {}
    used = [sum(nodes[b] for nodes in kept.values()) for b in range(len(problem.places))]
    left = [block.nodes - n for block, n in zip(problem.places, used, strict=True)]
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
