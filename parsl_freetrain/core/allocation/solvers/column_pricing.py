"""The pricing problem of column generation: a trainer's best way to hold nodes at given prices.

A trainer that holds nodes of several blocks loses them as the blocks end. Its value is a sum over
the intervals between ends; each term depends only on the nodes left before and after an end. The
best way is therefore a longest path through these counts.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.problem import Bid, Problem

Floats = NDArray[np.float64]
Way = tuple[int, ...]
"""Nodes in each place."""


class Ways:
    """All ways in which one bid can hold nodes.

    Parameters
    ----------
    problem
        The problem. Its places are in the order of their ends, no two places end together, and
        trainers may span places.
    bid
        One of its bids.
    """

    def __init__(self, problem: Problem, bid: Bid) -> None:
        self._problem, self._bid = problem, bid
        places = problem.places
        most = min(bid.max_nodes, problem.nodes)
        usable = [bid.usable(n) for n in range(most + 1)]
        rate = np.array([bid.curve.rate_at(n) for n in usable])
        left = np.arange(most + 1)
        self._going = left[:, None] - left
        self._terms: list[Floats] = []
        since = 0.0
        short = problem.too_short(bid)
        for b, block in enumerate(places):
            end = min(block.remaining_s, problem.horizon_s)
            there = 0 if b in short else block.nodes
            term = np.where(
                (self._going < 0) | (self._going > there), -np.inf, ((end - since) * rate)[:, None]
            )
            if block.remaining_s < problem.horizon_s:
                term -= np.where(self._going > 0, (bid.rescale_down_s * rate)[:, None], 0.0)
            self._terms.append(term)
            since = end
        cost_s = np.where(left > bid.current_nodes, bid.rescale_up_s, bid.rescale_down_s)
        if bid.current_nodes <= most:
            # The same number of nodes, but other ones. Keeping its own nodes is a separate way.
            cost_s[bid.current_nodes] = bid.rescale_up_s if bid.current_nodes else 0.0
        allowed = np.array([n == count for n, count in enumerate(usable)])
        self._start = np.where(allowed, -cost_s * bid.current_rate, -np.inf)
        held = problem.held(bid)
        self._held = held if bid.usable(bid.current_nodes) == bid.current_nodes else None
        self._held_worth = problem.value(bid, held)

    def best(self, prices: Floats, caps: NDArray[np.int64] | None = None) -> tuple[Way, float]:
        """The way that is worth most after paying ``prices`` for each node of each place, and its
        worth after paying.

        ``caps`` is the maximum number of nodes of each place.
        """
        terms, after = self._priced(prices, caps)
        first = self._start + after[0]
        left = int(first.argmax())
        worth, way = float(first[left]), []
        for term, rest in zip(terms, after[1:], strict=True):
            then = int((term[left] + rest).argmax())
            way.append(left - then)
            left = then
        if (
            self._held is not None
            and self._held_worth - prices @ self._held >= worth
            and (caps is None or (caps >= self._held).all())
        ):
            return self._held, float(self._held_worth - prices @ self._held)
        return tuple(way), worth

    def at_least(self, prices: Floats, least: float) -> Iterator[Way]:
        """Every way whose worth after paying is at least ``least``."""
        terms, after = self._priced(prices)

        def go_on(place: int, left: int, so_far: float) -> Iterator[Way]:
            if place == len(terms):
                yield ()
                return
            reached = so_far + terms[place][left]
            for then in np.flatnonzero(reached + after[place + 1] >= least).tolist():
                for rest in go_on(place + 1, then, float(reached[then])):
                    yield (left - then, *rest)

        for left in np.flatnonzero(self._start + after[0] >= least).tolist():
            yield from (
                way for way in go_on(0, left, float(self._start[left])) if way != self._held
            )
        if self._held is not None and self._held_worth - prices @ self._held >= least:
            yield self._held

    def _priced(
        self, prices: Floats, caps: NDArray[np.int64] | None = None
    ) -> tuple[list[Floats], list[Floats]]:
        """The terms after paying, and by place and nodes left the maximum worth of the remaining
        places.
        """
        terms = [
            term - price * self._going for term, price in zip(self._terms, prices, strict=True)
        ]
        if caps is not None:
            terms = [
                np.where(self._going > cap, -np.inf, term)
                for term, cap in zip(terms, caps, strict=True)
            ]
        after = [np.full(len(self._going), -np.inf)]
        after[0][0] = 0.0
        for term in reversed(terms):
            after.append((term + after[-1]).max(axis=1))
        return terms, after[::-1]
