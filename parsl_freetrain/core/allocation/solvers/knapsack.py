"""A multiple-choice knapsack: one count per trainer, with the largest sum of values that fits. A
price per node (a Lagrange multiplier) bounds the optimum; a count further from the bound than the
best known choice cannot be part of a better one. A dynamic programme searches the few others
exactly, those with the cheapest alternative first (an expanding core: Pisinger, European Journal of
Operational Research 83 (1995) 394-410).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
# Sums of a thousand values are exact to about this share of their size.
ROUNDING = 1e-13
_STEPS = 100


def best_counts(values: Floats, nodes: int) -> Integers | None:
    """The counts of the largest sum of ``values`` (trainers, counts) that fit; None: none."""
    if nodes < 0:
        return None
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    allowed = np.isfinite(values)
    least = allowed.argmax(axis=1)
    if not allowed.any(axis=1).all() or least.sum() > nodes:
        return None
    free: Integers = values.argmax(axis=1)
    if free.sum() <= nodes:
        return free
    price, low, high = _price(values, nodes, least, free)
    reduced = values - price * np.arange(values.shape[1])
    losses = reduced.max(axis=1, keepdims=True) - reduced
    sizes = np.abs(values, where=allowed, out=np.zeros_like(values))
    tolerance = ROUNDING * float(sizes.max(axis=1).sum())
    start = _fill(losses, price, low, high, nodes, tolerance)
    return _search(losses, price, start, nodes, tolerance)


def _price(
    values: Floats, nodes: int, least: Integers, free: Integers
) -> tuple[float, Integers, Integers]:
    """The price of the lowest bound, and choices that fit and do not, where their lines cross."""
    counts = np.arange(values.shape[1])
    rows = np.arange(len(values))
    low, high = least, free
    low_total, high_total = int(low.sum()), int(high.sum())
    low_worth, high_worth = float(values[rows, low].sum()), float(values[rows, high].sum())
    # Above this price every trainer takes its minimum.
    steps = np.maximum(counts - least[:, None], 1)
    ceiling = float(((values - values[rows, least][:, None]) / steps).max())
    floor = 0.0
    price = ceiling
    for step in range(_STEPS):
        crossing = (high_worth - low_worth) / (high_total - low_total)
        price = crossing if step % 3 < 2 else (floor + ceiling) / 2
        choice = (values - price * counts).argmax(axis=1)
        total, worth = int(choice.sum()), float(values[rows, choice].sum())
        if price == crossing and (
            total in (low_total, high_total)
            or worth - price * total <= low_worth - price * low_total + ROUNDING * abs(worth)
        ):
            break
        if total <= nodes:
            low, low_total, low_worth, ceiling = choice, total, worth, price
        else:
            high, high_total, high_worth, floor = choice, total, worth, price
    return price, low, high


def _fill(
    losses: Floats, price: float, low: Integers, high: Integers, nodes: int, tolerance: float
) -> Integers:
    """A good choice that fits: ``low``, with fitting counts of ``high``, then the best changes."""
    rows = np.arange(len(losses))
    choice = low.copy()
    left = nodes - int(low.sum())
    gains = high - low
    for j in np.flatnonzero(gains > 0):
        if gains[j] <= left:
            choice[j] = high[j]
            left -= int(gains[j])
    worth = price * np.arange(losses.shape[1]) - losses
    for _ in range(len(losses)):
        if left == 0:
            break
        better = worth - worth[rows, choice][:, None]
        better[np.arange(losses.shape[1]) > (choice + left)[:, None]] = -np.inf
        j, k = np.unravel_index(int(better.argmax()), better.shape)
        if better[j, k] <= tolerance:
            break
        left -= int(k - choice[j])
        choice[j] = k
    return choice


@dataclass(frozen=True)
class _Stage:
    """One trainer's changes, by the number of nodes above that at the price to which they led."""

    row: int
    changes: Integers
    least: int
    taken: NDArray[np.int32]


def _search(
    losses: Floats, price: float, start: Integers, nodes: int, tolerance: float
) -> Integers:
    """The choice of least loss: ``start``, or a better one of counts that lose less than it."""
    rows = np.arange(len(losses))
    base: Integers = losses.argmin(axis=1)
    slack = nodes - int(base.sum())
    limit = price * (nodes - int(start.sum())) + float(losses[rows, start].sum())
    other = losses.copy()
    other[rows, base] = np.inf
    cheapest = other.min(axis=1)
    stages: list[_Stage] = []
    best: tuple[int, int] | None = None  # number of stages, nodes above the number at the price
    loss, least = np.zeros(1), 0
    for j in np.argsort(cheapest, kind='stable'):
        # Below the limit by no more than rounding is no improvement.
        if cheapest[j] >= limit - tolerance:
            break
        counts = np.flatnonzero(losses[j] < limit - tolerance)
        loss, least, stage = _widen(loss, least, int(j), counts - base[j], losses[j, counts])
        kept = np.flatnonzero(loss < limit - tolerance)
        if not len(kept):
            break
        loss, least = loss[kept[0] : kept[-1] + 1], least + int(kept[0])
        stages.append(stage)
        fitting = loss[: max(slack - least + 1, 0)]
        if len(fitting):
            total = fitting + price * (slack - least - np.arange(len(fitting)))
            i = int(total.argmin())
            if total[i] < limit - tolerance:
                limit, best = float(total[i]), (len(stages), least + i)
    if best is None:
        return start
    choice = base.copy()
    done, more = best
    for stage in reversed(stages[:done]):
        change = int(stage.changes[stage.taken[more - stage.least]])
        choice[stage.row] += change
        more -= change
    return choice


def _widen(
    loss: Floats, least: int, row: int, changes: Integers, costs: Floats
) -> tuple[Floats, int, _Stage]:
    """The least loss for each change of the number of nodes, with one more trainer."""
    first = int(changes[0])
    wider = np.full(len(loss) + int(changes[-1]) - first, np.inf)
    taken = np.zeros(len(wider), dtype=np.int32)
    for i, (change, cost) in enumerate(zip(changes.tolist(), costs.tolist(), strict=True)):
        part = slice(change - first, change - first + len(loss))
        reached = loss + cost
        better = reached < wider[part]
        np.copyto(wider[part], reached, where=better)
        np.copyto(taken[part], i, where=better)
    return wider, least + first, _Stage(row, changes, least + first, taken)
