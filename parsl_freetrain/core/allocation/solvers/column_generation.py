"""Column generation and branch and price: the exact allocation of blocks with several ends or node
classes. There are too many ways to hold nodes to list them all, so they are generated
(:mod:`.column_pricing`): a linear programme over the known ways puts prices on nodes, each trainer
proposes its best way at these prices, until none is new; the prices bound the optimum. The
programme divides a few trainers between sets of places, or between keeping and changing. The search
branches on these: to keep or to change, then the places, the number of nodes, those of one place.
It ends when the best known allocation reaches the bound of every open branch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np

from parsl_freetrain.core.allocation.feasibility import stay_put
from parsl_freetrain.core.allocation.problem import Answer, Problem
from parsl_freetrain.core.allocation.solution import NO_GAIN, Asked, Found, groups_of
from parsl_freetrain.core.allocation.solvers.column_master import Caps, Master
from parsl_freetrain.core.allocation.solvers.column_pricing import Floats, Integers, Pricing, Region

_SLACK = 1e-12  # relative to the caps: node-seconds are sums of floats


class Incumbent:
    """The best allocation known, and the search around it while ``go_on``."""

    def __init__(
        self, pricing: Pricing, caps: Caps, ways: Integers, go_on: Callable[[], bool]
    ) -> None:
        self._pricing, self._caps, self._go_on = pricing, caps, go_on
        self._slack = _SLACK * np.maximum(np.abs(caps.most), 1.0)
        self.ways, self.worth = ways, -np.inf
        self.offer(ways)

    def offer(self, ways: Integers) -> bool:
        pricing = self._pricing
        worth = float(self._worths(pricing.every, ways).sum())
        kept = pricing.region.keep & (ways == pricing.held).all(axis=1)
        allowed = pricing.region.has(pricing.every, ways, kept).all()
        if worth > self.worth and allowed and (self._free(ways) >= 0).all():
            self.ways, self.worth = ways.copy(), worth
            return True
        return False

    def round(self, master: Master, shares: Floats, prices: Floats) -> None:
        """From the programme's shares: bids with one set of places get their mean, then others."""
        heaviest = np.zeros(len(self._pricing.every))
        np.maximum.at(heaviest, master.bid, shares)
        divided, mean = master.divided(shares), np.zeros(self.ways.shape)
        np.add.at(mean, master.bid, shares[:, None] * master.ways)
        chosen = np.where(divided[:, None], 0, np.floor(mean + 1e-6)).astype(np.int64)
        for j in np.argsort(-heaviest, kind='stable'):
            if not divided[j]:
                continue
            found = self._reply(chosen, prices * 0.999, np.array([j]))
            if found is not None:
                chosen[j] = found[1][0]
        self.polish(chosen)

    def polish(self, ways: Integers) -> None:
        """Let bids choose again from own and free nodes until none gains; offer the result."""
        every, ways = self._pricing.every, ways.copy()
        while self._go_on():
            reply = self._reply(ways, np.zeros(ways.shape), every)
            if reply is None:
                return
            worth, better = reply
            gain = worth - self._worths(every, ways)
            least = 1e-9 * abs(worth).max(initial=0.0)
            changed = False
            for j in np.argsort(-gain, kind='stable'):
                if gain[j] <= least:
                    break
                moved = ways.copy()
                moved[j] = better[j]
                if (self._free(moved) >= 0).all():
                    ways, changed = moved, True
            if not changed:
                break
        self.offer(ways)

    def _reply(
        self, ways: Integers, prices: Floats, bids: Integers
    ) -> tuple[Floats, Integers] | None:
        """The best ways of these bids if each alone may choose again; None if one has none."""
        places = self._pricing.places
        room = np.maximum(np.floor(self._free(ways)[:places]).astype(np.int64) + ways[bids], 0)
        region = self._pricing.region.of(bids).within(room, self._pricing.held[bids])
        worth, found, _ = self._pricing.best(prices[bids], region, bids)
        return (worth, found) if np.isfinite(worth).all() else None

    def _free(self, ways: Integers) -> Floats:
        use = self._caps.use(self._pricing.every, ways).sum(axis=0)
        free: Floats = self._caps.most - use + self._slack
        return free

    def _worths(self, bids: Integers, ways: Integers) -> Floats:
        kept = self._pricing.region.keep[bids] & (ways == self._pricing.held[bids]).all(axis=1)
        return np.where(kept, self._pricing.held_worth[bids], self._pricing.worth(bids, ways))


_ROUNDS = 200
# Numbers in one table by trainer and count.
_MOST_NUMBERS = 3e7
_WHOLE = 1e-6
# A linear programme that is divided anyway is solved to this share of the gap that is left, or of
# the gap that the first one usually leaves (as a share of the bound).
_CLOSE, _USUAL = 0.25, 3e-3
# A better allocation is sought around every n-th linear programme, and thoroughly around some of
# them. With more than a few places that takes long, and the first ones are rounded besides.
_EVERY, _FEW, _FIRST = 8, 6, 4
_DIVES, _DIVES_OF_MANY = (1, 8, 24, 72, 200, 600), (2, 24, 72, 200, 600)
_CLEAR = 0.5  # a share from which on a bid is fixed without looking at the others first
_PROVEN = 1e-9  # the prices of a linear programme are exact to about this share


class ColumnAllocator:
    """Exact by branch and price; after ``time_limit_s`` seconds, the best found or staying put."""

    def __init__(self, time_limit_s: float = 10.0) -> None:
        self.time_limit_s = time_limit_s

    def applies(self, problem: Problem) -> bool:
        """Whether trainers span blocks with several ends, and only single ones have minimums."""
        ends = len(groups_of(problem))
        largest = max((min(bid.max_nodes, problem.nodes) for bid in problem.bids), default=0)
        small = ends * len(problem.bids) * largest <= _MOST_NUMBERS
        spans = ends > 1 and bool(problem.bids) and problem.spans_blocks and problem.held_fits
        shared = (limit for limit in problem.limits if limit.least > 0)
        return spans and small and all(len(problem.members(limit)) == 1 for limit in shared)

    def allocate(self, problem: Problem) -> Answer:
        asked = Asked(problem, 'columns')
        return asked.solved(lambda merged: _Search(merged, asked, self.time_limit_s).found())


@dataclass(order=True)
class _Branch:
    minus_bound: float
    number: int
    region: Region = field(compare=False)
    prices: Floats = field(compare=False)  # of the caps
    divided: tuple[Region, Region] | None = field(compare=False)  # None: there is no more to find


class _Search:
    """The search for the optimum of one problem; no allocation is worth more than ``bound``."""

    def __init__(self, problem: Problem, asked: Asked, time_limit_s: float) -> None:
        self._problem, self._asked, self._time_limit_s = problem, asked, time_limit_s
        self._pricing, self._caps = Pricing(problem), Caps(problem)
        self._master = Master(self._pricing, self._caps)
        self._opened = 0
        self.bound, self._closed = np.inf, -np.inf
        staying = stay_put(problem)
        ways = np.array([staying[bid.name] for bid in problem.bids], dtype=np.int64)
        self._best = Incumbent(self._pricing, self._caps, ways, lambda: self._left_s() > 0)

    def found(self) -> Found:
        status = self._run()
        if self._best.worth == -np.inf:  # none is known that keeps all limits
            return Found(status)
        ways = self._best.ways.tolist()
        nodes = {bid.name: tuple(way) for bid, way in zip(self._problem.bids, ways, strict=True)}
        return Found(status, nodes, self.bound)

    def _run(self) -> str:
        pricing, every = self._pricing, self._pricing.every
        for ways, kept in ((np.zeros_like(pricing.held), False), (pricing.held, True)):
            flags = np.full(len(every), kept)
            some = np.flatnonzero(pricing.region.has(every, ways, flags))
            self._master.add(some, ways[some], flags[some])
        branch = self._open(pricing.region, np.zeros(len(self._caps.most)), np.inf)
        waiting: list[_Branch] = []
        while branch is not None:
            self.bound = max(-branch.minus_bound, -waiting[0].minus_bound if waiting else -np.inf)
            if self._left_s() <= 0:
                return 'feasible'
            if branch.divided is None:
                self._closed = max(self._closed, -branch.minus_bound)
            parts = branch.divided or ()
            for child in [self._open(part, branch.prices, -branch.minus_bound) for part in parts]:
                if child is not None:
                    heappush(waiting, child)
            branch = self._next(waiting)
        self.bound = max(self._closed, self._best.worth)
        if self._best.worth == -np.inf:
            return 'infeasible'
        rounding = 1e-15 * float(np.abs(self._master.worth).max(initial=0.0))  # of sums of prices
        proven = self.bound - self._best.worth <= max(_PROVEN * abs(self._best.worth), rounding)
        return 'optimal' if proven else 'feasible'

    def _next(self, waiting: list[_Branch]) -> _Branch | None:
        branch = heappop(waiting) if waiting else None
        reached = self._best.worth + self._rounding()
        return branch if branch is not None and -branch.minus_bound > reached else None

    def _left_s(self) -> float:
        return self._time_limit_s - self._asked.seconds

    def _rounding(self) -> float:
        return NO_GAIN * abs(self._best.worth) if np.isfinite(self._best.worth) else 0.0

    def _open(self, region: Region, prices: Floats, bound: float) -> _Branch | None:
        """Solve the programme of a region; None if nothing better than the best can be in it."""
        master, caps, every = self._master, self._caps, self._pricing.every
        master.allow(region.has(master.bid, master.ways, master.kept))
        converged, exact, divided = False, False, None
        for _ in range(_ROUNDS):
            optimum, paid = master.solve()
            # The first prices are far off, and become good sooner when they change less.
            for trial in (0.5 * (prices + paid), paid)[0 if self._opened == 0 else 1 :]:
                best, ways, kept = self._pricing.best(caps.prices(trial), region)
                if not np.isfinite(best).all():
                    return None  # a bid has no way here
                at_trial = float(trial @ caps.most + best.sum())
                if at_trial < bound:
                    bound, prices = at_trial, trial
                if master.add(every, ways, kept):
                    break
            else:
                converged = True
            if bound <= self._best.worth + self._rounding():
                return None
            left = bound - optimum
            exact = converged or left <= self._rounding() or self._left_s() <= 0
            if exact or left <= _CLOSE * min(bound - self._best.worth, _USUAL * abs(bound)):
                shares = master.shares()
                divided = self._divide(region, shares, caps.prices(prices))
                if exact or divided is not None:
                    break
        self._opened += 1
        few = self._pricing.places <= _FEW
        if divided is not None and self._opened in (_DIVES if few else _DIVES_OF_MANY):
            self._dive(region, shares, prices)
        elif divided is None or self._opened % _EVERY == 0 or (not few and self._opened <= _FIRST):
            self._best.round(master, shares, caps.prices(prices))
        return _Branch(-bound, self._opened, region, prices, divided)

    def _dive(self, region: Region, shares: Floats, prices: Floats) -> None:
        """Fix divided bids with clearly the largest shares to their places, and solve again."""
        master, caps, every = self._master, self._caps, self._pricing.every
        fixed = np.zeros(len(every), dtype=bool)
        while self._left_s() > 0:
            largest = np.zeros(len(every))
            np.maximum.at(largest, master.bid, shares)
            largest[fixed | ~master.divided(shares)] = -1.0
            if largest.max() < 0:
                break
            for j in np.flatnonzero(largest >= min(_CLEAR, largest.max())).tolist():
                mine = np.flatnonzero(master.bid == j)
                way = mine[shares[mine].argmax()]
                fixed[j], region = True, _as(region, j, master.ways[way], bool(master.kept[way]))
            master.allow(region.has(master.bid, master.ways, master.kept))
            _, prices = master.solve()
            best, ways, kept = self._pricing.best(caps.prices(prices), region)
            if prices @ caps.most + best.sum() <= self._best.worth:
                return
            if master.add(every, ways, kept):
                _, prices = master.solve()
            shares = master.shares()
        self._best.round(master, shares, caps.prices(prices))

    def _divide(
        self, region: Region, shares: Floats, prices: Floats
    ) -> tuple[Region, Region] | None:
        """Two parts of a region, so that the present shares are in neither of them."""
        master = self._master
        taken = np.flatnonzero(shares > _WHOLE)
        bids = np.flatnonzero(np.bincount(master.bid[taken]) > 1)
        if not len(bids):
            return None
        chosen = [taken[master.bid[taken] == j] for j in bids]
        means = np.array([shares[mine] @ master.ways[mine] / shares[mine].sum() for mine in chosen])
        values = np.array([shares[m] @ master.worth[m] / shares[m].sum() for m in chosen])
        near = np.floor(means + _WHOLE).astype(np.int64)
        lost = ((means - near) * prices[bids]).sum(axis=1)
        i = int((values - lost - self._pricing.worth(bids, near)).argmax())
        return self._divided_by(region, int(bids[i]), chosen[i], shares[chosen[i]])

    def _divided_by(
        self, region: Region, j: int, ways: Integers, shares: Floats
    ) -> tuple[Region, Region]:
        if self._master.kept[ways].any():
            return _with(region, j, high=-1), _with(region, j, keep=False)
        nodes = self._master.ways[ways]
        share = shares @ (nodes > 0) / shares.sum()
        place = int(np.minimum(share, 1 - share).argmax())
        if _WHOLE < share[place] < 1 - _WHOLE:  # an end that takes some nodes costs a restart
            most, least = region.most.copy(), region.least.copy()
            most[j, place], least[j, place] = 0, 1
            return replace(region, most=most), replace(region, least=least)
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


def _as(region: Region, j: int, way: Integers, kept: bool) -> Region:
    """The region with a bid fixed to keep what it holds, or to the places of a way."""
    if kept:
        return _with(region, j, high=-1)
    most, least = region.most.copy(), region.least.copy()
    most[j, way == 0], least[j, way > 0] = 0, np.maximum(least[j, way > 0], 1)
    return replace(_with(region, j, keep=False), most=most, least=least)


def _with(region: Region, j: int, **bounds: int) -> Region:
    changed = {}
    for name, value in bounds.items():
        array = getattr(region, name).copy()
        array[j] = value
        changed[name] = array
    return replace(region, **changed)
