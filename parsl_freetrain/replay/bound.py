"""A bound that no decisions exceed on a recorded trace, even if they knew when each node leaves.

Whatever is decided, let x[k, b] be the share of the trainers that have b nodes between the k-th
instant of the trace and the next one, and y[k, b] the share of those that still have the same nodes
after the next one. A trainer with a number of nodes between two such b counts in part as each; if
numbers change between instants, a mean is taken. Then

- they train at most the sum of x[k, b] * (the rate of the fastest trainer on b nodes) per second;
- the sum of b * x[k, b] is at most the number of idle nodes, and that of b * y[k, b] the number of
  those that do not leave at the next instant;
- y[k, b] is at most x[k, b] and x[k + 1, b], and each of x[k, b] - y[k, b] pays: at least the
  cheaper of the two rescales, at the rate of the slowest trainer on b nodes.

The best x and y are the solution of a linear programme. It is a bound: it may divide trainers.
"""

from collections.abc import Sequence

import numpy as np

from parsl_freetrain.core.allocation.solvers.highs import Ints, solved_sparse
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.replay.trace import Floats, Trace

_INSTANTS = 200
# In each programme, as one for all would take too long; growth from one to the next is not counted.


def most_samples(
    trace: Trace, known_ends: bool, trainers: Sequence[Trainer], at_a_time: int
) -> float:
    """A bound of what ``at_a_time`` trainers can train on a trace, all there all the time."""
    curves = [t.curve for t in trainers if t.curve is not None]
    largest = max(t.max_nodes for t in trainers)
    # Between two of these counts, every curve is linear.
    counts = sorted({0, largest, *(n for c in curves for n in c.nodes if n < largest)})
    rates = np.array([[curve.rate_at(n) for n in counts] for curve in curves])
    paid_s = min(min(t.rescale_up_s, t.rescale_down_s) for t in trainers)
    share = min(at_a_time, len(trainers))
    starts, ends, _, _ = trace.intervals(known_ends)
    starts, ends, at = np.sort(starts), np.sort(ends), np.union1d(starts, ends)
    gone = np.searchsorted(ends, at, side='right')
    idle = (np.searchsorted(starts, at, side='right') - gone)[:-1]
    stay = idle - np.diff(gone)
    stay[at[1:] >= trace.end_s] = idle[at[1:] >= trace.end_s]
    steps = np.diff(at)[:, np.newaxis] * rates.max(axis=0)
    paid, counted = paid_s * rates.min(axis=0), np.array(counts)
    parts = [slice(i, i + _INSTANTS) for i in range(0, len(idle), _INSTANTS)]
    most = (_most(steps[one], paid, counted, idle[one] / share, stay[one] / share) for one in parts)
    return share * sum(most)


def _most(trains: Floats, pays: Floats, counts: Ints, idle: Floats, stay: Floats) -> float:
    """The best of one divided trainer: ``trains`` samples, ``pays`` for nodes given up."""
    instants, ways = trains.shape
    x = np.arange(trains.size).reshape(trains.shape)
    y = x + trains.size
    k = np.repeat(np.arange(instants), ways).reshape(trains.shape)
    nodes, one = np.broadcast_to(counts, trains.shape), np.ones(trains.shape)
    # Rows: the whole trainer, its nodes, those that it keeps; y is at most the x before and after.
    before = 3 * instants + x
    after = before + x.size
    entries = (
        (x, k, one),
        (x, instants + k, nodes),
        (y, 2 * instants + k, nodes),
        (y, before, one),
        (x, before, -one),
        (y[:-1], after[:-1], one[1:]),
        (x[1:], after[:-1], -one[1:]),
    )
    column, row, value = (np.concatenate([e[i].ravel() for e in entries]) for i in range(3))
    order = np.argsort(column, kind='stable')
    whole, none = np.ones(instants), np.zeros(2 * x.size)
    solver, scale = solved_sparse(
        np.concatenate([(trains - pays).ravel(), np.tile(pays, instants)]),
        (column[order], row[order], value[order]),
        np.concatenate([whole, np.full(2 * (instants + x.size), -np.inf)]),
        np.concatenate([whole, idle, stay, none]),
        solver='simplex',
        presolve='off',  # it takes longer than it saves
    )
    return -float(solver.getInfo().objective_function_value) / scale
