"""Column generation's master problem; each solve in HiGHS starts from the last basis."""

from typing import Any

import numpy as np

from parsl_freetrain.core.allocation.problem import Problem
from parsl_freetrain.core.allocation.solvers.column_pricing import Flags, Floats, Integers, Pricing
from parsl_freetrain.core.allocation.solvers.highs import LARGEST, scale_of

# A bid without a way costs this many times the largest worth, so that every region has a solution.
_PENALTY = 1e3


class Caps:
    """Nodes of places, then limits. ``weight``: (caps, bids, places); ``most``: (caps,)."""

    def __init__(self, problem: Problem) -> None:
        bids, places = len(problem.bids), len(problem.places)
        weights = [np.zeros((bids, places)) for _ in problem.places]
        for b, weight in enumerate(weights):
            weight[:, b] = 1.0
        most = [float(place.nodes) for place in problem.places]
        for limit in problem.limits:
            member = [limit.concerns(bid.name) for bid in problem.bids]
            if limit.most is not None:
                weights.append(np.outer(member, np.ones(places)))
                most.append(float(limit.most))
            if limit.node_s is not None:
                weights.append(np.outer(member, problem.seconds))
                most.append(limit.node_s)
        self.weight = np.array(weights)
        self.most = np.array(most)

    def use(self, bid: Integers, ways: Integers) -> Floats:
        """Shape (ways, caps): what each way of the bids with these indices uses."""
        use: Floats = np.einsum('cwp,wp->wc', self.weight[:, bid], ways)
        return use

    def prices(self, paid: Floats) -> Floats:
        """Shape (bids, places): the price of a node, from the prices of the caps."""
        of_node: Floats = (paid @ self.weight.reshape(len(paid), -1)).reshape(self.weight.shape[1:])
        return of_node


class Master:
    """The programme, and its ways: by way its ``bid``, nodes by place, if it keeps, its worth."""

    def __init__(self, pricing: Pricing, caps: Caps) -> None:
        import highspy  # takes long to import, and most problems are solved without it

        self._highspy, self._pricing, self._caps = highspy, pricing, caps
        places = pricing.places
        self.bid = np.zeros(0, dtype=np.int64)
        self.ways = np.zeros((0, places), dtype=np.int64)
        self.kept = np.zeros(0, dtype=bool)
        self.worth = np.zeros(0)
        self._allowed = np.zeros(0, dtype=bool)
        self._known: set[tuple[int, bool, tuple[int, ...]]] = set()
        best, _, _ = pricing.best(np.zeros((len(pricing.every), places)), pricing.region)
        worths = np.abs(np.concatenate([best, pricing.held_worth]))
        # Infinite: a bid that must get nodes can get none here.
        self._scale = scale_of(float(worths[np.isfinite(worths)].max(initial=0.0)))
        self._lp: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ('output_flag', False),
            ('threads', 1),
            ('presolve', 'off'),
            ('simplex_strategy', 4),  # primal: with new columns the last basis is still feasible
            ('simplex_scale_strategy', 0),
        ):
            self._lp.setOptionValue(option, value)
        for most in caps.most:
            self._lp.addRow(-highspy.kHighsInf, most, 0, [], [])
        for _ in pricing.every:
            self._lp.addRow(1.0, 1.0, 0, [], [])
        for j in pricing.every:  # no way at all
            row = np.array([len(caps.most) + j], dtype=np.int32)
            self._lp.addCol(_PENALTY * LARGEST, 0.0, highspy.kHighsInf, 1, row, np.ones(1))

    def add(self, bid: Integers, ways: Integers, kept: Flags) -> int:
        new = []
        keys = zip(bid.tolist(), kept.tolist(), map(tuple, ways.tolist()), strict=True)
        for i, key in enumerate(keys):
            if key not in self._known:
                self._known.add(key)
                new.append(i)
        if not new:
            return 0
        bid, ways, kept = bid[new], ways[new], kept[new]
        worth = np.where(kept, self._pricing.held_worth[bid], self._pricing.worth(bid, ways))
        rows = np.zeros((len(new), len(self._caps.most) + len(self._pricing.every)))
        rows[:, : len(self._caps.most)] = self._caps.use(bid, ways)
        rows[np.arange(len(new)), len(self._caps.most) + bid] = 1.0
        way, row = np.nonzero(rows)
        count, starts = len(new), np.searchsorted(way, np.arange(len(new))).astype(np.int32)
        free = np.zeros(count), np.full(count, self._highspy.kHighsInf)
        entries = len(way), starts, row.astype(np.int32), rows[way, row]
        self._lp.addCols(count, -worth * self._scale, *free, *entries)
        self.bid, self.ways = np.append(self.bid, bid), np.concatenate([self.ways, ways])
        self._allowed = np.append(self._allowed, np.ones(len(new), dtype=bool))
        self.kept, self.worth = np.append(self.kept, kept), np.append(self.worth, worth)
        return len(new)

    def allow(self, allowed: Flags) -> None:
        changed = np.flatnonzero(allowed != self._allowed)
        if len(changed):
            columns = changed.astype(np.int32) + len(self._pricing.every)
            upper = np.where(allowed[changed], self._highspy.kHighsInf, 0.0)
            self._lp.changeColsBounds(len(columns), columns, np.zeros(len(columns)), upper)
            self._allowed = allowed

    def solve(self) -> tuple[float, Floats]:
        self._lp.run()
        dual = np.array(self._lp.getSolution().row_dual[: len(self._caps.most)])
        optimum = -float(self._lp.getInfo().objective_function_value) / self._scale
        return optimum, np.maximum(-dual, 0.0) / self._scale

    def shares(self) -> Floats:
        """By way, how much of it the optimum takes; nothing of the ways added since."""
        shares = np.zeros(len(self.bid))
        found = np.array(self._lp.getSolution().col_value[len(self._pricing.every) :])
        shares[: len(found)] = found
        return shares

    def divided(self, shares: Floats) -> Flags:
        """By bid, whether its shares are of several sets of places, or of keeping and a change."""
        taken = shares > 1e-6
        used = np.where(self.kept[:, None], 2, self.ways > 0)[taken]
        most, least = (np.full((len(self._pricing.every), used.shape[1]), n) for n in (0, 2))
        np.maximum.at(most, self.bid[taken], used)
        np.minimum.at(least, self.bid[taken], used)
        divided: Flags = np.any(most > least, axis=1)
        return divided
