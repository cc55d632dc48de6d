"""Upper bounds of the objective that need no solver."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.problem import Bid, Problem
from parsl_freetrain.core.model.types import ScalingCurve

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
    """:meth:`ScalingCurve.rate_at` of many counts."""
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
