"""Column generation: the exact allocation of blocks with several ends, in seconds.

A trainer can hold nodes of the blocks in too many ways to list them all (see
:mod:`parsl_freetrain.core.allocation.solvers.column_pricing`), so they are generated as needed. A
linear programme over the ways known so far puts prices on the nodes; each trainer then proposes its
best way at these prices, until none proposes a new one. The prices bound the optimum from above. A
way that falls short of its trainer's best one by more than the gap between this bound and the best
known allocation cannot be part of a better allocation. A small MILP finds the optimum among the
rest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from parsl_freetrain.core.allocation.block_groups import grouped, groups_of, spread
from parsl_freetrain.core.allocation.feasibility import objections
from parsl_freetrain.core.allocation.incumbent import pinned, stay_put
from parsl_freetrain.core.allocation.problem import Answer, Limit, Problem
from parsl_freetrain.core.allocation.solution import NO_GAIN, Asked
from parsl_freetrain.core.allocation.solvers.column_pricing import Floats, Way, Ways

if TYPE_CHECKING:
    import pulp

logger = logging.getLogger(__name__)

_ROUNDS = 200
_MOST_WAYS = 100_000
_FIRST_SHORT, _WIDER = 3e-5, 2.0
# A matrix by nodes before and after an end is kept for each trainer and block.
_MOST_NUMBERS = 3e7
_LARGEST = 1e5  # as in the MILP of counts


class ColumnAllocator:
    """Exact allocation by column generation.

    Parameters
    ----------
    time_limit_s
        Seconds after which the best allocation found so far is taken, if it beats staying put.
    """

    def __init__(self, time_limit_s: float = 10.0) -> None:
        self.time_limit_s = time_limit_s

    def applies(self, problem: Problem) -> bool:
        """Whether this solver can solve the problem: blocks with several ends that trainers span,
        and no limit with a minimum.
        """
        ends = len(groups_of(problem))
        numbers = ends * sum(min(bid.max_nodes, problem.nodes) ** 2 for bid in problem.bids)
        return (
            ends > 1
            and problem.spans_blocks
            and problem.held_fits
            and numbers <= _MOST_NUMBERS
            and all(limit.least <= 0 for limit in problem.limits)
        )

    def allocate(self, problem: Problem) -> Answer:
        """The optimum, or the best allocation found in time; never worse than staying put."""
        asked = Asked(problem, 'columns')
        try:
            groups = groups_of(problem)
            status, found = _Search(grouped(problem, groups), asked, self.time_limit_s).run()
            nodes = None if found is None else spread(problem, groups, found)
        except Exception:  # whatever a solver raises, training continues unchanged
            logger.warning('The solver failed, what runs is kept.', exc_info=True)
            return asked.stay()
        if status == 'infeasible' or nodes is None or objections(problem, nodes):
            return asked.stay('infeasible' if status == 'infeasible' else None)
        return asked.best_of(status, nodes)


class _Search:
    """The search for the optimum of one problem."""

    def __init__(self, problem: Problem, asked: Asked, time_limit_s: float) -> None:
        self._problem, self._asked, self._time_limit_s = problem, asked, time_limit_s
        self._seconds = [min(problem.horizon_s, block.remaining_s) for block in problem.places]
        keep, staying = pinned(problem), stay_put(problem)
        nothing = (0,) * len(problem.places)
        self._known: list[dict[Way, float]] = []  # by bid, the worth of each way
        self._ways: list[Ways | None] = []  # None: it has to keep what it holds
        for bid in problem.bids:
            start = {keep[bid.name]} if bid.name in keep else {nothing, staying[bid.name]}
            self._known.append({way: problem.value(bid, way) for way in start})
            self._ways.append(None if bid.name in keep else Ways(problem, bid))

    def run(self) -> tuple[str, dict[str, Way] | None]:
        """'optimal', 'feasible' or 'infeasible', and the best allocation found."""
        priced = self._price()
        if priced is None:
            return 'infeasible', None
        prices, bound, best = priced
        found, worth = self._choose(self._known)
        if found is None:
            return 'feasible', None
        found, worth = self._improve(found)
        # Search all ways that fall short by at most `short`, starting with a small value of it,
        # which usually suffices.
        gap = bound - worth
        short = min(gap, _FIRST_SHORT * abs(bound))
        while gap > self._rounding(bound):
            if self._left_s() <= 0:
                return 'feasible', found
            near = self._near(prices, best, short + self._rounding(bound))
            if near is None:
                return 'feasible', found
            better, more = self._choose(near)
            if better is not None and more > worth:
                found, worth = self._improve(better)
            if self._left_s() <= 0:
                return 'feasible', found
            if bound - worth <= short or short >= gap:
                break
            gap = bound - worth
            short = min(_WIDER * short, gap)
        return 'optimal', found

    def _left_s(self) -> float:
        return self._time_limit_s - self._asked.seconds

    def _rounding(self, bound: float) -> float:
        return NO_GAIN / 10 * abs(bound)

    def _price(self) -> tuple[list[Floats], float, list[float]] | None:
        """For each bid, the prices of the nodes of each place; the bound that they give; and for
        each bid the worth of its best way after paying.
        """
        lowest = None
        for _ in range(_ROUNDS):
            if self._left_s() <= 0 and lowest is not None:
                break
            master = _Programme(self._problem, self._known, self._seconds, whole=False)
            if not master.solve(max(self._left_s(), 0.01)):
                return None
            prices, fixed = master.prices()
            bests, new = [], False
            for j, (ways, known) in enumerate(zip(self._ways, self._known, strict=True)):
                chosen = {way: worth - float(prices[j] @ way) for way, worth in known.items()}
                top = max(chosen.values())
                if ways is not None:
                    way, left = ways.best(prices[j])
                    top = max(top, left)
                    if way not in known:
                        known[way] = self._problem.value(self._problem.bids[j], way)
                        new = True
                bests.append(top)
            bound = fixed + sum(bests)
            if lowest is None or bound < lowest[1]:
                lowest = prices, bound, bests
            if not new or bound - master.worth <= self._rounding(bound):
                break
        return lowest

    def _near(
        self, prices: list[Floats], best: list[float], short: float
    ) -> list[dict[Way, float]] | None:
        """All ways that fall short of the best one by at most ``short``; None if there are too
        many.
        """
        near, room = [], _MOST_WAYS
        for j, (ways, known) in enumerate(zip(self._ways, self._known, strict=True)):
            if ways is None:
                near.append(known)
                continue
            found = list(islice(ways.at_least(prices[j], best[j] - short), room))
            room -= len(found)
            if room <= 0:
                return None
            near.append({way: self._problem.value(self._problem.bids[j], way) for way in found})
        return near

    def _improve(self, found: dict[str, Way]) -> tuple[dict[str, Way], float]:
        """Improve an allocation, and return it with its worth. Each trainer in turn chooses again
        among its own nodes and the free ones, until none finds a better way.
        """
        problem = self._problem
        free = np.array([block.nodes for block in problem.places]) - np.array(
            list(found.values())
        ).sum(axis=0)
        again = True
        while again and self._left_s() > 0:
            again = False
            for bid, ways in zip(problem.bids, self._ways, strict=True):
                if ways is None:
                    continue
                now = found[bid.name]
                way, worth = ways.best(np.zeros(len(free)), free + now)
                before = problem.value(bid, now)
                if worth > before + self._rounding(before) and not objections(
                    problem, found | {bid.name: way}
                ):
                    free = free + now - way
                    found = found | {bid.name: way}
                    again = True
        return found, problem.objective(found)

    def _choose(self, known: Sequence[dict[Way, float]]) -> tuple[dict[str, Way] | None, float]:
        """The best allocation of these ways found in time, and its worth."""
        programme = _Programme(self._problem, known, self._seconds, whole=True)
        if not programme.solve(max(self._left_s(), 0.01)):
            return None, -np.inf
        found = programme.chosen()
        if objections(self._problem, found):
            return None, -np.inf
        return found, self._problem.objective(found)


class _Programme:
    """Chooses one way for each bid: a linear or an integer linear programme."""

    def __init__(
        self, problem: Problem, known: Sequence[dict[Way, float]], seconds: list[float], whole: bool
    ) -> None:
        import pulp  # takes long to import, and most problems are solved without it

        self._pulp, self._problem, self._seconds, self._known = pulp, problem, seconds, known
        self._lp: Any = pulp.LpProblem('allocation', pulp.LpMaximize)
        self._chosen: list[dict[Way, pulp.LpVariable]] = [
            {
                way: self._lp.add_variable(
                    f'trainer_{j}_way_{i}', 0, 1, pulp.LpInteger if whole else pulp.LpContinuous
                )
                for i, way in enumerate(ways)
            }
            for j, ways in enumerate(known)
        ]
        self._scale = _LARGEST / max(
            (abs(worth) for ways in known for worth in ways.values() if worth), default=1.0
        )
        self._lp.setObjective(
            pulp.LpAffineExpression(
                {
                    variable: self._scale * known[j][way]
                    for j, ways in enumerate(self._chosen)
                    for way, variable in ways.items()
                }
            )
        )
        for ways in self._chosen:
            self._lp += pulp.lpSum(ways.values()) == 1
        self._weights = [
            (self._weight_of_place(b), float(block.nodes)) for b, block in enumerate(problem.places)
        ]
        for limit in problem.limits:
            if limit.most is not None:
                self._weights.append(
                    (self._weight_of_limit(limit, [1.0] * len(seconds)), float(limit.most))
                )
            if limit.node_s is not None:
                self._weights.append((self._weight_of_limit(limit, seconds), limit.node_s))
        self._caps = []
        for weights, most in self._weights:
            terms = {
                variable: weight
                for j, ways in enumerate(self._chosen)
                for way, variable in ways.items()
                if (weight := float(weights[j] @ way))
            }
            cap = pulp.LpAffineExpression(terms) <= most
            if terms or most < 0:
                self._lp += cap
            self._caps.append(cap if terms else None)

    def _weight_of_place(self, place: int) -> Floats:
        weights = np.zeros((len(self._known), len(self._seconds)))
        weights[:, place] = 1.0
        return weights

    def _weight_of_limit(self, limit: Limit, of_node: list[float]) -> Floats:
        members = [not limit.members or bid.name in limit.members for bid in self._problem.bids]
        return np.outer(members, of_node)

    def solve(self, time_limit_s: float) -> bool:
        """Whether there is a solution."""
        self._lp.solve(
            self._pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=0.0, gapAbs=0.0, threads=1)
        )
        return self._lp.sol_status in (
            self._pulp.LpSolutionOptimal,
            self._pulp.LpSolutionIntegerFeasible,
        )

    @property
    def worth(self) -> float:
        """The objective."""
        return float(self._pulp.value(self._lp.objective)) / self._scale

    def prices(self) -> tuple[list[Floats], float]:
        """By bid, the price of a node of each place; and the total price of all nodes and
        limits.
        """
        # A cap's price cannot be negative; libraries disagree on the sign.
        paid = [abs(cap.pi) / self._scale if cap is not None else 0.0 for cap in self._caps]
        each = [
            sum(
                (
                    price * weights[j]
                    for price, (weights, _) in zip(paid, self._weights, strict=True)
                ),
                np.zeros(len(self._seconds)),
            )
            for j in range(len(self._known))
        ]
        return each, sum(price * most for price, (_, most) in zip(paid, self._weights, strict=True))

    def chosen(self) -> dict[str, Way]:
        """The chosen way of each bid."""
        return {
            bid.name: max(ways, key=lambda way: ways[way].value() or 0.0)
            for bid, ways in zip(self._problem.bids, self._chosen, strict=True)
        }
