"""From a solver's result to an :class:`Answer`, compared with what runs; blocks that are alike."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.feasibility import is_allowed, stay_put
from parsl_freetrain.core.allocation.problem import Answer, Bid, Problem
from parsl_freetrain.core.model.types import ScalingCurve

# What gains less than this share of the objective is rounding, and no reason to move anything.
NO_GAIN = 1e-10

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """A solver's status, nodes in each place by trainer (None: none found), and an upper bound."""

    status: str
    nodes: Mapping[str, Sequence[int]] | None = None
    bound: float | None = None


class Asked:
    """A problem on its way through the solver of this name."""

    def __init__(self, problem: Problem, solver: str) -> None:
        self._started = perf_counter()
        self._problem, self._solver = problem, solver

    @cached_property
    def staying(self) -> dict[str, tuple[int, ...]]:
        return stay_put(self._problem)

    @property
    def seconds(self) -> float:
        return perf_counter() - self._started

    def solved(self, solve: Callable[[Problem], Found]) -> Answer:
        """The best that ``solve`` finds for merged blocks, or what runs where that is no worse."""
        try:
            groups = groups_of(self._problem)
            status, found, bound = solve(grouped(self._problem, groups))
            nodes = None if found is None else spread(self._problem, groups, found)
        except Exception:  # whatever a solver raises, training continues unchanged
            logger.warning('The solver failed, what runs is kept.', exc_info=True)
            return self.stay()
        if status == 'infeasible':
            return self.stay(status)
        # A solver that timed out may leave values that are no solution.
        if nodes is None or not is_allowed(self._problem, nodes):
            return self.stay()
        return self.best_of(status, nodes, bound=bound)

    def best_of(
        self,
        status: str,
        found: Mapping[str, Sequence[int]],
        worth: float | None = None,
        staying_worth: float | None = None,
        bound: float | None = None,
    ) -> Answer:
        """``found``, or staying put where that is worth no less (worths: if known) and allowed."""
        worth = self._problem.objective(found) if worth is None else worth
        before = self._problem.objective(self.staying) if staying_worth is None else staying_worth
        if worth <= before + NO_GAIN * abs(before) and self._staying_is_allowed():
            found, worth = self.staying, before
        return self._answer(status, worth, before, found, bound)

    def of(self, status: str, found: Mapping[str, Sequence[int]]) -> Answer:
        objective = self._problem.objective
        return self._answer(status, objective(found), objective(self.staying), found)

    def stay(self, status: str | None = None) -> Answer:
        """What runs is kept; by default 'feasible' if that keeps all limits, else 'infeasible'."""
        worth = self._problem.objective(self.staying)
        allowed = 'feasible' if self._staying_is_allowed() else 'infeasible'
        return self._answer(status or allowed, worth, worth, self.staying)

    def _staying_is_allowed(self) -> bool:
        return not self._problem.limits or is_allowed(self._problem, self.staying)

    def _answer(
        self,
        status: str,
        worth: float,
        before: float,
        nodes: Mapping[str, Sequence[int]],
        bound: float | None = None,
    ) -> Answer:
        allocation = {name: sum(counts) for name, counts in nodes.items()}
        by_block: dict[str, dict[str, int]] = {}
        if self._problem.blocks:
            blocks = [block.name for block in self._problem.blocks]
            named = {name: zip(blocks, counts, strict=True) for name, counts in nodes.items()}
            by_block = {name: {block: n for block, n in each if n} for name, each in named.items()}
        given, limit = (allocation, by_block), self._bound(status, worth, bound)
        return Answer(status, worth, self._solver, self.seconds, *given, before, limit)

    def _bound(self, status: str, worth: float, known: float | None) -> float | None:
        if status == 'optimal':
            return worth
        if status == 'infeasible':
            return None
        if known is None or known == math.inf:
            known = upper_bound(self._problem)
        return max(worth, known)


Floats = NDArray[np.float64]

_STEPS = 30


def worth_by_count(
    bid: Bid, most: int, horizon_s: float, stay_s: float = math.inf, node_class: str = ''
) -> Floats:
    """Worth at each count of nodes of a class that stay so long; -inf where not allowed."""
    counts = np.arange(most + 1)
    rate = rates_at(bid.curve_on(node_class), counts)
    seconds = horizon_s if stay_s >= horizon_s else stay_s - bid.rescale_down_s
    # On another class even fewer nodes than it holds are new ones.
    now = bid.current_nodes if node_class == bid.current_class else 0
    worth = seconds * rate
    worth[: now or 1] -= bid.rescale_down_s * bid.current_rate if bid.current_nodes else 0.0
    worth[now + 1 :] -= bid.rescale_up_s * bid.current_rate
    if bid.sizes:
        banned = np.ones(most + 1, dtype=bool)
        banned[[0, *bid.counts(most)]] = False
        worth[banned] = -np.inf
    else:
        worth[1 : bid.min_nodes] = -np.inf
    if stay_s < bid.shortest_s or not bid.uses(node_class):
        worth[1:now] = -np.inf
        worth[now + 1 :] = -np.inf
    return worth


def rates_at(curve: ScalingCurve, counts: NDArray[np.int64]) -> Floats:
    points, rates = curve.nodes, curve.rate
    if points[0]:
        points, rates = (0, *points), (0.0, *rates)
    return np.interp(counts, points, rates)


def upper_bound(problem: Problem) -> float:
    """By a price per node; without limits and ends of blocks, so it can be far off."""
    nodes = sum(block.nodes for block in problem.places)
    worths = [_with_fewer(problem, bid, nodes) for bid in problem.bids]

    def at(price: float) -> float:
        gains = (worth - price * np.arange(len(worth)) for worth in worths)
        return price * nodes + sum(float(gain.max()) for gain in gains)

    # The bound is convex in the price; each step leaves out a third of the interval.
    low, high = 0.0, max((float(np.diff(worth).max(initial=0.0)) for worth in worths), default=0.0)
    best = at(low)
    for _ in range(_STEPS):
        if high <= low:
            break
        left, right = low + (high - low) / 3, high - (high - low) / 3
        of_left, of_right = at(left), at(right)
        best = min(best, of_left, of_right)
        low, high = (low, right) if of_left <= of_right else (left, high)
    return best


def _with_fewer(problem: Problem, bid: Bid, nodes: int) -> Floats:
    """The most that each count of nodes can be worth: nodes that it cannot use do not harm it."""
    most = min(bid.max_nodes, nodes)
    if bid.mixed_parts:  # nodes of several classes are no faster than as many of the fastest one
        bid = replace(bid, rescale_up_s=0.0, rescale_down_s=0.0)
    worths = [
        worth_by_count(bid, most, problem.horizon_s, node_class=node_class)
        for node_class in problem.places_by_class
    ]
    return np.maximum.accumulate(np.max(worths, axis=0))


Groups = tuple[tuple[int, ...], ...]


def groups_of(problem: Problem) -> Groups:
    """Indices of the places of one class that end together; each alone where that is not exact:
    :meth:`Problem.value` tells two such blocks apart only by the cost of moving.
    """
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
