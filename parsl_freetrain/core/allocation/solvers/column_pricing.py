"""The pricing problem of column generation: every trainer's best way to hold nodes at given prices.
Its value is a sum over the intervals between ends; each term depends on the nodes left and on
whether some go at the end, not on how many. So the best number that goes is the argument of a
maximum over a window of counts, and one pass over the blocks (of each node class) prices all
trainers at once.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.feasibility import pinned
from parsl_freetrain.core.allocation.problem import Problem
from parsl_freetrain.core.allocation.solution import rates_at

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

_ALL = slice(None)  # unlike an array of all indices, it makes no copies


@dataclass(frozen=True)
class Region:
    keep: Flags  # (bids,): whether a bid may keep exactly what it holds
    low: Integers  # (bids,): least number of nodes of a bid that changes
    high: Integers  # and the greatest
    least: Integers  # (bids, places): least number of nodes of each place, if it changes
    most: Integers  # and the greatest

    def of(self, bids: Integers) -> 'Region':
        low, high, least, most = (one[bids] for one in (self.low, self.high, self.least, self.most))
        return Region(self.keep[bids], low, high, least, most)

    def within(self, room: Integers, held: Integers) -> 'Region':
        """Only the ways with at most ``room`` nodes, shape (bids, places)."""
        keep = self.keep & (held <= room).all(axis=1)
        return replace(self, keep=keep, most=np.minimum(self.most, room))

    def has(self, bid: Integers, ways: Integers, kept: Flags) -> Flags:
        """For each way, of the bids with these indices, whether it is in the region."""
        total = ways.sum(axis=1)
        changed = (total >= self.low[bid]) & (total <= self.high[bid])
        changed &= ((ways >= self.least[bid]) & (ways <= self.most[bid])).all(axis=1)
        return np.where(kept, self.keep[bid], changed)


class Pricing:
    """All ways in which bids can hold nodes: kept, or changed (worth less where the nodes are the
    same). Places are in order of their ends, no two of one class end together.
    """

    def __init__(self, problem: Problem) -> None:
        bids, places = problem.bids, problem.places
        self.places, self.every = len(places), np.arange(len(bids))
        most = max((min(bid.max_nodes, problem.nodes) for bid in bids), default=0)
        self._counts = np.arange(most + 1)
        self._classes = [np.array(of_class) for of_class in problem.places_by_class.values()]
        names = list(problem.places_by_class)
        self._class_of = np.array([names.index(place.node_class) for place in places])
        # By class, bid and count.
        self._rate = np.zeros((len(names), len(bids), most + 1))
        self._start = np.full((len(names), len(bids), most + 1), -np.inf)
        limit = np.zeros((len(bids), len(places)), dtype=np.int64)
        held = np.array([problem.held(bid) for bid in bids], dtype=np.int64)
        self.held = held.reshape(len(bids), len(places))
        self.held_worth = np.array([problem.value(bid, problem.held(bid)) for bid in bids])
        keep = pinned(problem)
        room = np.array([place.nodes for place in places])
        fits: Flags = np.all(self.held <= room, axis=1)
        can_keep = np.zeros(len(bids), dtype=bool)
        low, high = np.zeros(len(bids), dtype=np.int64), np.full(len(bids), most)
        for j, bid in enumerate(bids):
            usable = np.zeros(most + 1, dtype=np.int64)
            allowed = np.array([0, *bid.counts(most)])
            usable[allowed] = allowed
            usable = np.maximum.accumulate(usable)
            for c, name in enumerate(names):
                self._rate[c, j] = rates_at(bid.curve_on(name), usable)
                grows = allowed >= (bid.current_nodes if name == bid.current_class else 1)
                cost_s = np.where(grows, bid.rescale_up_s, bid.rescale_down_s)
                self._start[c, j, allowed] = -cost_s * bid.current_rate
            limit[j] = room
            limit[j, list(problem.barred(bid))] = 0
            can_keep[j] = fits[j] and bid.usable(bid.current_nodes) == bid.current_nodes
            if bid.name in keep:
                high[j] = -1
        for rule in problem.limits:
            for j in problem.members(rule) if rule.least > 0 else ():  # one, see ColumnAllocator
                low[j] = max(low[j], rule.least)
                can_keep[j] &= bids[j].current_nodes >= rule.least
        self._ends = [min(place.remaining_s, problem.horizon_s) for place in places]
        self._loss = np.array([bid.rescale_down_s for bid in bids])[None, :, None] * self._rate
        # By place: what trainers do from the end before it, of a place of its class, to its own.
        self._until = {
            b: (self._ends[b] - since) * self._rate[c]
            for c, of_class in enumerate(self._classes)
            for b, since in zip(of_class, [0.0, *(self._ends[b] for b in of_class)], strict=False)
        }
        self._goes = [place.remaining_s < problem.horizon_s for place in places]
        self.region = Region(can_keep, low, high, np.zeros_like(limit), limit)

    def worth(self, bid: Integers, ways: Integers) -> Floats:
        """:meth:`Problem.value` of these changed ways of the bids with these indices."""
        node_class = self._class_of[ways.argmax(axis=1)]
        # Tables are read by one index, which is quicker than by three.
        at = (node_class * len(self.every) + bid) * len(self._counts) + ways.sum(axis=1)
        worth: Floats = self._start.take(at)
        since = 0.0
        for b, end in enumerate(self._ends):
            worth += (end - since) * self._rate.take(at)
            if self._goes[b]:
                worth -= np.where(ways[:, b] > 0, self._loss.take(at), 0.0)
            at -= ways[:, b]
            since = end
        if len(self._classes) > 1:
            mixed = (ways > 0) & (self._class_of != node_class[:, None])
            worth = np.where(mixed.any(axis=1), -np.inf, worth)
        return worth

    def best(
        self, prices: Floats, region: Region, bids: Integers | slice = _ALL
    ) -> tuple[Floats, Integers, Flags]:
        """By bid: the most that a way is worth after ``prices``, that way, and if it keeps."""
        worth, ways = self._best_of_class(0, prices, region, bids)
        if len(self._classes) > 1:
            worth = np.where(self._elsewhere(0, region), -np.inf, worth)
        for c in range(1, len(self._classes)):
            of_class, nodes = self._best_of_class(c, prices, region, bids)
            better = (of_class > worth) & ~self._elsewhere(c, region)
            worth[better], ways[better] = of_class[better], nodes[better]
        held = self.held_worth[bids] - np.einsum('jb,jb->j', prices, self.held[bids])
        kept = region.keep & (held >= worth)
        ways[kept] = self.held[bids][kept]
        return np.where(kept, held, worth), ways, kept

    def _elsewhere(self, c: int, region: Region) -> Flags:
        needed: Flags = np.any(np.delete(region.least, self._classes[c], axis=1), axis=1)
        return needed

    def _best_of_class(
        self, c: int, prices: Floats, region: Region, bids: Integers | slice
    ) -> tuple[Floats, Integers]:
        """The same for changed ways with nodes of class ``c`` only."""
        places = self._classes[c].tolist()
        counts, rows = self._counts, np.arange(len(prices))
        after = np.full((len(prices), len(counts)), -np.inf)
        after[:, 0] = 0.0
        steps = []
        for b in reversed(places):
            paid = prices[:, b, None] * counts
            low, high = region.least[:, b], region.most[:, b]
            reached = after + paid
            value = _window_maximum(reached, np.maximum(low, 1), high)
            value -= paid
            if self._goes[b]:
                value -= self._loss[c][bids]
            after[low > 0] = -np.inf
            steps.append((reached, value > after))
            np.maximum(value, after, out=after)
            after += self._until[b][bids]
        after += self._start[c][bids]
        some = np.flatnonzero((region.low > 0) | (region.high < counts[-1]))
        outside = counts < region.low[some, None]
        outside |= counts > region.high[some, None]
        after[some] = np.where(outside, -np.inf, after[some])
        left = after.argmax(axis=1)
        worth, ways = after[rows, left], np.zeros(prices.shape, dtype=np.int64)
        for b, (reached, some_go) in zip(places, reversed(steps), strict=True):
            going = np.flatnonzero(some_go[rows, left])
            go = left[going, None] - counts
            inside = go >= np.maximum(region.least[going, b, None], 1)
            inside &= go <= region.most[going, b, None]
            then = np.where(inside, reached[going], -np.inf).argmax(axis=1)
            ways[going, b] = left[going] - then
            left[going] = then
        return worth, ways


def _window_maximum(values: Floats, low: Integers, high: Integers) -> Floats:
    """For row j, column n: the maximum of ``values[j, m]`` over n - high[j] <= m <= n - low[j]."""
    best = np.empty_like(values)
    # In most rows the window holds all smaller counts.
    best[:, 0] = -np.inf
    np.maximum.accumulate(values[:, :-1], axis=1, out=best[:, 1:])
    best[high < low] = -np.inf
    narrow = np.flatnonzero((low <= high) & ((high < values.shape[1] - 1) | (low > 1)))
    if len(narrow):
        best[narrow] = _narrow_maximum(values[narrow], low[narrow], high[narrow])
    return best


def _narrow_maximum(values: Floats, low: Integers, high: Integers) -> Floats:
    rows, size = values.shape
    # Maxima over windows of 1, 2, 4, ... columns; two of them cover any window.
    width = np.minimum(high, size) - low + 1
    tops = [values]
    for k in range(int(width.max(initial=1)).bit_length() - 1):
        wider, shift = tops[-1].copy(), 1 << k
        np.maximum(wider[:, shift:], tops[-1][:, :-shift], out=wider[:, shift:])
        tops.append(wider)
    level = np.maximum(np.frexp(np.maximum(width, 1))[1] - 1, 0)
    top, row = np.array(tops), np.arange(rows)[:, None]
    last = np.arange(size) - low[:, None]
    first = last - (width - (1 << level))[:, None]
    level = level[:, None]
    at_last = np.where(last >= 0, top[level, row, np.maximum(last, 0)], -np.inf)
    best = np.maximum(at_last, np.where(first >= 0, top[level, row, np.maximum(first, 0)], -np.inf))
    best[width <= 0] = -np.inf
    return best
