"""Checks that an allocation keeps every rule of its problem, as each solver's answer has to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parsl_freetrain.core.allocation.answer import Answer
from parsl_freetrain.core.allocation.incumbent import pinned
from parsl_freetrain.core.allocation.problem import Limit, Problem


def by_place(problem: Problem, answer: Answer) -> dict[str, tuple[int, ...]]:
    """The answer's nodes in each of :attr:`Problem.places`, by trainer."""
    if not problem.blocks:
        return {name: (count,) for name, count in answer.allocation.items()}
    return {
        name: tuple(blocks.get(block.name, 0) for block in problem.blocks)
        for name, blocks in answer.by_block.items()
    }


def objections(problem: Problem, allocation: Mapping[str, Sequence[int]]) -> list[str]:
    """What is wrong with an allocation, one sentence each; empty: nothing. ``allocation``: by
    trainer, its nodes in each of :attr:`Problem.places`.
    """
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
            found.append(
                f'{used} of the {block.nodes} nodes of block {block.name!r} are given away.'
            )
    return found + [
        sentence for limit in problem.limits for sentence in _beyond(problem, limit, allocation)
    ]


def _beyond(problem: Problem, limit: Limit, allocation: Mapping[str, Sequence[int]]) -> list[str]:
    members = set(limit.members) or allocation.keys()
    nodes = sum(sum(counts) for name, counts in allocation.items() if name in members)
    node_s = sum(
        n * s
        for name, counts in allocation.items()
        if name in members
        for n, s in zip(counts, problem.seconds, strict=True)
    )
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
