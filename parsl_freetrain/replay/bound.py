"""A bound that no decisions exceed on a recorded trace, even if they knew when each node leaves.

The best total rate of M trainers on N nodes, R(N), is concave and known. What is trained is at most
the integral of R over the nodes in use, minus what interruptions cost. Each use of a node that
leaves ends in an interruption of the trainer that holds it. For each node that it frees, that costs
at least the cheaper rescale at the lowest rate per node. A node that is not used instead costs at
least its marginal rate, as long as it is idle, since R is concave. So each idle interval costs at
least the smaller of the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.trace import Floats, Trace


def most_samples(
    trace: Trace, known_ends: bool, trainers: Sequence[Trainer], at_a_time: int
) -> float:
    """A bound of the samples that the trainers can train on a trace.

    Growth counts as free, and all trainers as there all the time and as fast as the fastest one.

    Trainers are taken to go on beyond their totals: the end of a trainer frees its nodes at no
    cost, which the bound does not count.

    Parameters
    ----------
    known_ends
        As for :meth:`Trace.intervals`.
    trainers
        With their curves and rescale costs.
    at_a_time
        Maximum number of trainers that share the nodes.
    """
    curves = [t.curve for t in trainers if t.curve is not None]
    counts, rates = _envelope(curves, max(t.max_nodes for t in trainers))
    slopes = np.append(np.diff(rates) / np.diff(counts), 0.0)
    share = min(at_a_time, len(trainers))
    cheapest_s = min(min(t.rescale_up_s, t.rescale_down_s) for t in trainers)
    per_node = min(
        rate / n
        for t in trainers
        if t.curve is not None
        for n in (*t.curve.nodes, t.max_nodes)
        if n and (rate := t.curve.rate_at(n))
    )
    starts, ends, _, _ = trace.intervals(known_ends)
    at = np.unique(np.concatenate([starts, ends]))
    nodes = np.searchsorted(np.sort(starts), at, side='right') - np.searchsorted(
        np.sort(ends), at, side='right'
    )
    each, lasts_s = nodes[:-1] / share, np.diff(at)
    # The rate of the last node: to the left of a corner of R.
    marginal = slopes[np.searchsorted(counts, each, side='left').clip(1) - 1]
    marginal[each > counts[-1]] = 0.0
    lost = np.concatenate([[0.0], np.cumsum(marginal * lasts_s)])
    unused = lost[np.searchsorted(at, ends)] - lost[np.searchsorted(at, starts)]
    leaves = ends < trace.end_s
    whole = share * np.interp(each, counts, rates) @ lasts_s
    return float(whole - np.minimum(unused, cheapest_s * per_node)[leaves].sum())


def _envelope(curves: Sequence[ScalingCurve], most: int) -> tuple[Floats, Floats]:
    """The corners of the smallest concave curve above all curves, up to ``most`` nodes."""
    at = sorted({0, most, *(n for c in curves for n in c.nodes if n < most)})
    hull: list[tuple[float, float]] = []
    best = 0.0
    for n in at:
        best = max(best, *(c.rate_at(n) for c in curves))
        while len(hull) > 1 and _turns_up(hull[-2], hull[-1], (n, best)):
            hull.pop()
        hull.append((float(n), best))
    counts, rates = np.array(hull).T
    return counts, rates


def _turns_up(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - b[0]) <= (c[1] - b[1]) * (b[0] - a[0])
