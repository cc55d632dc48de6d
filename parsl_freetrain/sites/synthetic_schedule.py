"""Synthetic schedules of idle nodes, fitted to the published statistics of OLCF Summit's holes: the
idle-node events of 10 to 24 February 2021 published with BFTrainer (arXiv 2106.12091), 423,502 idle
intervals of 4,734 nodes in 358.2 hours. A schedule reproduces the length of idle intervals (median
475 s, a tenth above 3,269 s; nodes that have been idle for long stay so), the number of nodes that
become idle at once (median 4, a hundredth above 512) and the time between such moments, that two
nodes that become idle together become busy together with probability about 0.75, and the mean share
of idle nodes (8.27 %). A smaller machine looks like a random sample of Summit's nodes; neither the
time of day nor the placement of nodes is reproduced.
"""

import math
from collections.abc import Sequence

import numpy as np

from parsl_freetrain.core.model.errors import refuse
from parsl_freetrain.sites.idle_schedule import Floats, IdleInterval, Ints, Schedule

_OURS = 'A generated schedule'
SUMMIT_NODES = 4734
SUMMIT_IDLE_SHARE = 0.0827

# (share of the intervals, seconds). The longest published ones, up to 70 hours, are left out: they
# carry 1 % of the idle time, and a tail drawn towards them would double the mean.
LENGTHS_S = (
    *((0.0, 60), (0.01, 71), (0.05, 81), (0.1, 91), (0.25, 162), (0.5, 475)),
    *((0.75, 1397), (0.9, 3269), (0.95, 4723), (0.99, 9246), (1.0, 12000)),
)
# (share of the moments at which nodes become idle, how many do).
COHORT_NODES = (
    *((0.0, 1), (0.25, 1), (0.5, 4), (0.75, 16), (0.9, 50)),
    *((0.95, 100), (0.99, 512), (0.995, 996), (1.0, 2000)),
)
# (share of such moments, seconds to the next one); the idle share gives the mean.
JOIN_GAPS_S = (
    *((0.0, 10), (0.1, 10), (0.25, 20), (0.5, 41), (0.75, 91)),
    *((0.9, 176), (0.95, 263), (0.99, 577), (0.999, 2325)),
)
# Moments at which nodes become busy: 11,015 in the published fortnight.
LEAVE_GAP_MEAN_S = 117.0
MIN_BUSY_S = 10.0

# A cohort that leaves in two parts, cut at a uniform place, keeps two thirds of its pairs together;
# where a quarter of the cohorts leaves as one, three quarters of all pairs stay together.
_SPLIT_PROBABILITY = 0.75
_SNAP = 0.1  # intervals move by at most this share of their length to end when others do
# The machine runs so long before time 0 that it no longer shows that it began empty.
_WARM_UP_S = 20_000.0

_Knots = tuple[tuple[float, float], ...]


def generate(
    nodes: int | Sequence[str],
    duration_s: float,
    seed: int,
    *,
    idle_share: float = SUMMIT_IDLE_SHARE,
    time_factor: float = 1.0,
) -> Schedule:
    """A random schedule of idle nodes that looks like Summit's. Raises BadInput for no node, a
    share that is not between 0 and 1, or a duration or a time factor that is not above 0. All
    intervals lie within 0 and ``duration_s``. Nodes that are idle at time 0 begin there.

    Parameters
    ----------
    nodes
        The number of nodes, which get the names ``node0000`` and so on, or their names.
    duration_s
        Length of the schedule in seconds, after ``time_factor`` was applied.
    seed
        The same arguments give the same schedule, bit by bit.
    idle_share
        The mean share of idle nodes, between 0 and 1. Large shares are not quite reached, because
        nodes that are idle already cannot become idle.
    time_factor
        Factor for every published time: with 1/60 a median hole lasts 8 s instead of 8 minutes.
    """
    names = _names(nodes)
    if not (math.isfinite(duration_s) and duration_s > 0):
        refuse(f'{_OURS}: duration_s', duration_s, 'a number of seconds above 0')
    if not 0 < idle_share < 1:
        refuse(f'{_OURS}: idle_share', idle_share, 'between 0 and 1')
    if not (math.isfinite(time_factor) and time_factor > 0):
        refuse(f'{_OURS}: time_factor', time_factor, 'a number above 0')
    draw = np.random.default_rng(seed)
    until_s = duration_s / time_factor
    count = int((until_s + 2 * _WARM_UP_S) / LEAVE_GAP_MEAN_S) + 1
    leaves = -_WARM_UP_S + np.cumsum(draw.exponential(LEAVE_GAP_MEAN_S, count))
    free_at = np.full(len(names), -math.inf)
    intervals: list[IdleInterval] = []
    for at_s in _join_times(draw, until_s, idle_share).tolist():
        joined = _cohort(draw, np.flatnonzero(free_at <= at_s - MIN_BUSY_S), idle_share)
        for part in _parts(draw, joined):
            end_s = _end(draw, at_s, leaves)
            free_at[part] = end_s
            # Rounding the factor's product could put an end a hair behind the duration.
            start, end = max(at_s, 0.0) * time_factor, min(end_s * time_factor, duration_s)
            if end > start:
                intervals.extend(IdleInterval(start, end, names[node]) for node in part.tolist())
    return Schedule(intervals)


def _names(nodes: int | Sequence[str]) -> tuple[str, ...]:
    names = tuple(f'node{i:04d}' for i in range(nodes)) if isinstance(nodes, int) else tuple(nodes)
    if not names or len(set(names)) != len(names):
        refuse(f'{_OURS}: nodes', nodes, 'a number, at least 1, or a list of different names')
    return names


def _quantile(knots: _Knots, share: Floats) -> Floats:
    """Values at these shares, log-linear between the knots."""
    at, values = zip(*knots, strict=True)
    return np.exp(np.interp(share, at, np.log(values)))


def _mean(knots: _Knots) -> float:
    return float(_quantile(knots, (np.arange(100_000) + 0.5) / 100_000).mean())


def _join_times(draw: np.random.Generator, until_s: float, idle_share: float) -> Floats:
    # What comes in per second x how long it stays = what is there.
    gap_s = _mean(COHORT_NODES) * _mean(LENGTHS_S) / (SUMMIT_NODES * idle_share)
    scale = gap_s / _mean(JOIN_GAPS_S)
    times: list[Floats] = []
    at_s = -_WARM_UP_S
    while at_s < until_s:
        times.append(at_s + np.cumsum(scale * _quantile(JOIN_GAPS_S, draw.random(1000))))
        at_s = float(times[-1][-1])
    joined = np.concatenate(times)
    return joined[joined < until_s]


def _cohort(draw: np.random.Generator, busy: Ints, idle_share: float) -> Ints:
    """Which of our busy nodes become idle when nodes of the whole machine do."""
    size = int(_quantile(COHORT_NODES, np.array([draw.random()]))[0])
    ours = min(1.0, len(busy) / (SUMMIT_NODES * (1 - idle_share)))
    count = min(len(busy), int(draw.binomial(size, ours)))
    return draw.choice(busy, size=count, replace=False) if count else busy[:0]


def _parts(draw: np.random.Generator, joined: Ints) -> list[Ints]:
    if draw.random() >= _SPLIT_PROBABILITY:
        return [joined] if len(joined) else []
    first = draw.random(len(joined)) < draw.random()
    return [part for part in (joined[first], joined[~first]) if len(part)]


def _end(draw: np.random.Generator, at_s: float, leaves: Floats) -> float:
    length_s = float(_quantile(LENGTHS_S, np.array([draw.random()]))[0])
    end_s = at_s + length_s
    place = int(np.searchsorted(leaves, end_s))
    near = leaves[max(0, place - 1) : place + 1]
    if len(near):
        nearest = float(near[np.argmin(np.abs(near - end_s))])
        if abs(nearest - end_s) <= _SNAP * length_s and nearest - at_s >= LENGTHS_S[0][1]:
            return nearest
    return end_s
