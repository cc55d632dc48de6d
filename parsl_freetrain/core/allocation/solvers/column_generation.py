"""Column generation and branch and price: the exact allocation of blocks with several ends.

A trainer can hold nodes of the blocks in too many ways to list them all (see
:mod:`parsl_freetrain.core.allocation.solvers.column_pricing`), so they are generated as needed. A
linear programme over the ways known so far puts prices on the nodes; each trainer then proposes its
best way at these prices, until none proposes a new one. The prices bound the optimum from above.

The linear programme divides a few trainers, mostly between keeping what they hold and changing it,
which costs a rescale. The search branches on these: to keep or to change, then the number of nodes,
then the nodes of one place. It ends when the bound of every open branch is reached by the best
known allocation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

import numpy as np

from parsl_freetrain.core.allocation.block_groups import grouped, groups_of, spread
from parsl_freetrain.core.allocation.feasibility import objections
from parsl_freetrain.core.allocation.incumbent import stay_put
from parsl_freetrain.core.allocation.problem import Answer, Problem
from parsl_freetrain.core.allocation.solution import NO_GAIN, Asked
from parsl_freetrain.core.allocation.solvers.column_incumbents import Incumbent
from parsl_freetrain.core.allocation.solvers.column_master import Caps, Master
from parsl_freetrain.core.allocation.solvers.column_pricing import Floats, Integers, Pricing, Region

logger = logging.getLogger(__name__)

_ROUNDS = 200
# Numbers in one table by trainer and count.
_MOST_NUMBERS = 3e7
_WHOLE = 1e-6
# A better allocation is sought around the first linear programmes, then around every n-th one.
_FIRST, _EVERY = 8, 16


class ColumnAllocator:
    """Exact allocation by branch and price.

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
        largest = max((min(bid.max_nodes, problem.nodes) for bid in problem.bids), default=0)
        return (
            ends > 1
            and bool(problem.bids)
            and problem.spans_blocks
            and problem.held_fits
            and ends * len(problem.bids) * largest <= _MOST_NUMBERS
            and all(limit.least <= 0 for limit in problem.limits)
        )

    def allocate(self, problem: Problem) -> Answer:
        """The optimum, or the best allocation found in time; never worse than staying put."""
        asked = Asked(problem, 'columns')
        try:
            groups = groups_of(problem)
            search = _Search(grouped(problem, groups), asked, self.time_limit_s)
            status = search.run()
            found = search.found()
            nodes = None if found is None else spread(problem, groups, found)
        except Exception:  # whatever a solver raises, training continues unchanged
            logger.warning('The solver failed, what runs is kept.', exc_info=True)
            return asked.stay()
        if status == 'infeasible' or nodes is None or objections(problem, nodes):
            return asked.stay('infeasible' if status == 'infeasible' else None)
        return asked.best_of(status, nodes, bound=search.bound)


@dataclass(order=True)
class _Branch:
    """A part of the search, those with the highest bound first."""

    minus_bound: float
    number: int
    region: Region = field(compare=False)
    prices: Floats = field(compare=False)  # of the caps
    divided: tuple[Region, Region] | None = field(compare=False)  # None: there is no more to find


class _Search:
    """The search for the optimum of one problem.

    Attributes
    ----------
    bound
        No allocation is worth more.
    """

    def __init__(self, problem: Problem, asked: Asked, time_limit_s: float) -> None:
        self._problem, self._asked, self._time_limit_s = problem, asked, time_limit_s
        self._pricing, self._caps = Pricing(problem), Caps(problem)
        self._master = Master(self._pricing, self._caps)
        self._numbers = count()
        self.bound = np.inf
        staying = stay_put(problem)
        ways = np.array([staying[bid.name] for bid in problem.bids], dtype=np.int64)
        self._best = Incumbent(self._pricing, self._caps, ways, lambda: self._left_s() > 0)

    def found(self) -> dict[str, tuple[int, ...]] | None:
        """The best allocation; None if none is known that keeps all limits."""
        if self._best.worth == -np.inf:
            return None
        ways = self._best.ways.tolist()
        return {bid.name: tuple(way) for bid, way in zip(self._problem.bids, ways, strict=True)}

    def run(self) -> str:
        """'optimal', 'feasible' or 'infeasible'."""
        pricing, every = self._pricing, self._pricing.every
        nothing = np.zeros_like(pricing.held)
        for ways, kept in ((nothing, False), (pricing.held, True)):
            flags = np.full(len(every), kept)
            some = np.flatnonzero(pricing.region.has(every, ways, flags))
            self._master.add(some, ways[some], flags[some])
        open_: list[_Branch] = []
        self._open(pricing.region, np.zeros(len(self._caps.most)), np.inf, open_)
        while open_:
            self.bound = -open_[0].minus_bound
            if self.bound <= self._best.worth + self._rounding():
                open_.clear()
                break
            if self._left_s() <= 0:
                return 'feasible'
            branch = heappop(open_)
            if branch.divided is None:
                continue
            for region in branch.divided:
                self._open(region, branch.prices, -branch.minus_bound, open_)
        return 'infeasible' if self._best.worth == -np.inf else 'optimal'

    def _left_s(self) -> float:
        return self._time_limit_s - self._asked.seconds

    def _rounding(self) -> float:
        return NO_GAIN * abs(self._best.worth) if np.isfinite(self._best.worth) else 0.0

    def _open(self, region: Region, prices: Floats, bound: float, open_: list[_Branch]) -> None:
        """Solve the linear programme of a region and keep it for later, unless nothing better than
        what is known can be in it.
        """
        master, caps, every = self._master, self._caps, self._pricing.every
        master.allow(region.has(master.bid, master.ways, master.kept))
        converged = False
        for _ in range(_ROUNDS):
            optimum, paid = master.solve()
            for trial in (0.5 * (prices + paid), paid):
                best, ways, kept = self._pricing.best(caps.prices(trial), region)
                if not np.isfinite(best).all():
                    return  # a bid has no way here
                at_trial = float(trial @ caps.most + best.sum())
                if at_trial < bound:
                    bound, prices = at_trial, trial
                if master.add(every, ways, kept):
                    break
            else:
                converged = True
            if bound <= self._best.worth + self._rounding():
                return
            if converged or bound - optimum <= self._rounding() or self._left_s() <= 0:
                break
        shares = master.shares()
        shares = np.append(shares, np.zeros(len(master.bid) - len(shares)))
        divided = self._divide(region, shares)
        number = next(self._numbers)
        if divided is None or number < _FIRST or number % _EVERY == 0:
            self._best.round(master, shares, caps.prices(prices))
            self._exchange(prices, bound)
        if bound > self._best.worth + self._rounding():
            heappush(open_, _Branch(-bound, number, region, prices, divided))

    def _exchange(self, prices: Floats, bound: float) -> None:
        of_node = self._caps.prices(prices)
        best, _, _ = self._pricing.best(of_node, self._pricing.region)
        master = self._master
        paid = (of_node[master.bid] * master.ways).sum(axis=1)
        losses = best[master.bid] - master.worth + paid
        self._best.exchange(master, losses, bound - self._best.worth)

    def _divide(self, region: Region, shares: Floats) -> tuple[Region, Region] | None:
        """Two parts of a region, so that the present shares are in neither of them."""
        master = self._master
        taken = np.flatnonzero(shares > _WHOLE)
        chosen, largest = None, -np.inf
        for j in np.unique(master.bid[taken]).tolist():
            mine = taken[master.bid[taken] == j]
            if len(mine) < 2:
                continue
            mean = shares[mine] @ master.ways[mine] / shares[mine].sum()
            near = np.floor(mean + _WHOLE).astype(np.int64)
            value = float(shares[mine] @ master.worth[mine])
            score = value - float(self._pricing.worth(np.array([j]), near[None])[0])
            if score > largest:
                chosen, largest = mine, score
        if chosen is None:
            return None
        return self._divided_by(region, int(master.bid[chosen[0]]), chosen, shares[chosen])

    def _divided_by(
        self, region: Region, j: int, ways: Integers, shares: Floats
    ) -> tuple[Region, Region]:
        kept = self._master.kept[ways]
        if kept.any():
            return _with(region, j, high=-1), _with(region, j, keep=False)
        nodes = self._master.ways[ways]
        totals, mean = nodes.sum(axis=1), shares @ nodes / shares.sum()
        if totals.min() < totals.max():
            split = int(np.clip(np.floor(mean.sum()), totals.min(), totals.max() - 1))
            return _with(region, j, high=split), _with(region, j, low=split + 1)
        place = int((nodes.max(axis=0) - nodes.min(axis=0)).argmax())
        here = nodes[:, place]
        split = int(np.clip(np.floor(mean[place]), here.min(), here.max() - 1))
        most, least = region.most.copy(), region.least.copy()
        most[j, place], least[j, place] = split, split + 1
        return replace(region, most=most), replace(region, least=least)


def _with(region: Region, j: int, **bounds: int) -> Region:
    """The region with other bounds for one bid."""
    changed = {}
    for name, value in bounds.items():
        array = getattr(region, name).copy()
        array[j] = value
        changed[name] = array
    return replace(region, **changed)
