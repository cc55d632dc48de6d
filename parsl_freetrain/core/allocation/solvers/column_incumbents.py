"""Good allocations from the linear programme of column generation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from parsl_freetrain.core.allocation.solvers.column_master import Caps, Master
from parsl_freetrain.core.allocation.solvers.column_pricing import Floats, Integers, Pricing

# Relative to the caps: node-seconds are sums of floats.
_SLACK = 1e-12


class Incumbent:
    """The best allocation that is known, and the search for better ones around it while ``go_on``.

    ``ways``: shape (bids, places); those given at first need not keep the caps.
    """

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
        """An allocation from the shares of the linear programme: bids with one set of places get
        their mean, the others choose one after the other from what is left, at these prices.
        """
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
        free = np.floor(self._free(ways)[:places]).astype(np.int64)
        room = np.maximum(free + ways[bids], 0)
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
