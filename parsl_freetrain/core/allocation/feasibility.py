"""The rules of a problem: objections to an allocation, and what runs kept as far as possible."""

from collections.abc import Mapping, Sequence

from parsl_freetrain.core.allocation.problem import Answer, Bid, Limit, Problem


def by_place(problem: Problem, answer: Answer) -> dict[str, tuple[int, ...]]:
    if not problem.blocks:
        return {name: (count,) for name, count in answer.allocation.items()}
    names, every = [block.name for block in problem.blocks], answer.by_block.items()
    return {name: tuple(blocks.get(one, 0) for one in names) for name, blocks in every}


def objections(problem: Problem, allocation: Mapping[str, Sequence[int]]) -> list[str]:
    """What is wrong with an allocation (nodes in each place, by trainer), one sentence each."""
    found = []
    names = {bid.name for bid in problem.bids}
    if set(allocation) != names:
        return [f'It is about other trainers than the problem: {sorted(set(allocation) ^ names)}.']
    keep = pinned(problem)
    for bid in problem.bids:
        nodes = tuple(allocation[bid.name])
        count = sum(nodes)
        if len(nodes) != len(problem.places) or min(nodes) < 0:
            found.append(f'{bid.name} gets {nodes}, which is no count for each place.')
        elif count and bid.usable(count) != count:
            found.append(f'{bid.name} gets {count} nodes, which is not one of its counts.')
        if not problem.spans_blocks and sum(1 for n in nodes if n) > 1:
            found.append(f'{bid.name} gets nodes of several blocks.')
        if len(classes := problem.classes_of(nodes)) > 1 and not bid.mixed_parts:
            found.append(f'{bid.name} gets nodes of the classes {", ".join(classes)}.')
        if nodes != problem.held(bid) and any(nodes[b] for b in problem.barred(bid)):
            found.append(
                f'{bid.name} is to start on nodes of a class that it does not use, or that do not '
                f'stay for the {bid.shortest_s:g} s that it needs.'
            )
        if keep.get(bid.name, nodes) != nodes:
            found.append(f'{bid.name} has to keep {keep[bid.name]} and gets {nodes}.')
    for b, block in enumerate(problem.places):
        used = sum(nodes[b] for nodes in allocation.values())
        if used > block.nodes:
            found.append(f'{used} of {block.nodes} nodes of block {block.name!r} are given away.')
    return found + [one for limit in problem.limits for one in _beyond(problem, limit, allocation)]


def _beyond(problem: Problem, limit: Limit, allocation: Mapping[str, Sequence[int]]) -> list[str]:
    members = set(limit.members) or allocation.keys()
    nodes = sum(sum(counts) for name, counts in allocation.items() if name in members)
    mine = [counts for name, counts in allocation.items() if name in members]
    node_s = sum(n * s for counts in mine for n, s in zip(counts, problem.seconds, strict=True))
    found = []
    if nodes < limit.least:
        found.append(
            f'Limit {limit.why!r} asks for at least {limit.least} nodes, {nodes} are given.'
        )
    if limit.most is not None and nodes > limit.most:
        found.append(f'Limit {limit.why!r} allows at most {limit.most} nodes, {nodes} are given.')
    # A count times seconds is exact to the last bit only in the sum's own order.
    if limit.node_s is not None and node_s > limit.node_s + 1e-9 * max(1.0, abs(limit.node_s)):
        found.append(f'Limit {limit.why!r} allows {limit.node_s} node-seconds, {node_s} are given.')
    return found


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
