"""Merges blocks of one class that end together for the solvers, and deals out their nodes.

Merging is exact. :meth:`Problem.value` distinguishes two such blocks only by the cost of moving to
other nodes. Where all held nodes fit (:attr:`Problem.held_fits`), the nodes can always be dealt
out so that nobody moves without need: a trainer whose count in the group stays keeps its nodes, one
that shrinks keeps some of them, and one that grows keeps all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from parsl_freetrain.core.allocation.problem import Problem

Groups = tuple[tuple[int, ...], ...]


def groups_of(problem: Problem) -> Groups:
    """Indices of the places by group, by their ends; each alone where grouping is not exact."""
    places = problem.places
    if len(places) == 1 or not (problem.spans_blocks and problem.held_fits):
        return tuple((b,) for b in range(len(places)))
    reach_s = max([problem.horizon_s, *(bid.shortest_s for bid in problem.bids)])
    alike: dict[tuple[float, str], list[int]] = {}
    for b, block in enumerate(places):
        alike.setdefault((min(block.remaining_s, reach_s), block.node_class), []).append(b)
    return tuple(tuple(alike[key]) for key in sorted(alike))


def grouped(problem: Problem, groups: Groups) -> Problem:
    if _as_they_are(problem, groups):
        return problem
    firsts = [problem.places[group[0]] for group in groups]
    counts = [sum(problem.places[b].nodes for b in group) for group in groups]
    blocks = tuple(replace(one, nodes=n) for one, n in zip(firsts, counts, strict=True))
    bids = []
    for bid in problem.bids:
        held = problem.held(bid)
        bids.append(replace(bid, held=tuple(sum(held[b] for b in group) for group in groups)))
    return replace(problem, blocks=blocks, bids=tuple(bids))


def spread(
    problem: Problem, groups: Groups, allocation: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Deal out counts: who shrinks keeps what lasts; who grows stays, then takes what lasts."""
    if _as_they_are(problem, groups):
        return {name: tuple(nodes) for name, nodes in allocation.items()}
    places = problem.places
    free = [block.nodes for block in places]
    dealt: dict[str, list[int]] = {}
    for bid in problem.bids:
        held, nodes = problem.held(bid), [0] * len(places)
        for group, count in zip(groups, allocation[bid.name], strict=True):
            for b in (
                sorted(group, key=lambda b: (-places[b].remaining_s, -held[b], b)) if count else ()
            ):
                nodes[b] = min(held[b], count)
                free[b] -= nodes[b]
                count -= nodes[b]
        dealt[bid.name] = nodes
    for bid in problem.bids:
        nodes = dealt[bid.name]
        for group, count in zip(groups, allocation[bid.name], strict=True):
            count -= sum(nodes[b] for b in group) if count else 0
            while count:
                there = [b for b in group if free[b]]
                b = min(there, key=lambda b: (not nodes[b], -places[b].remaining_s, -free[b], b))
                more = min(free[b], count)
                nodes[b] += more
                free[b] -= more
                count -= more
    return {name: tuple(nodes) for name, nodes in dealt.items()}


def _as_they_are(problem: Problem, groups: Groups) -> bool:
    return groups == tuple((b,) for b in range(len(problem.places)))
