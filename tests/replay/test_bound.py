"""The bound that no decisions exceed, even if they know what comes."""

import itertools

import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.replay.bound import most_samples
from parsl_freetrain.replay.trace import Trace
from tests.replay.test_virtual_clock import Interval, trace_of, trainer
from tests.support.properties import holds_for

WITH_0 = ScalingCurve((0, 1, 3), (0.0, 10.0, 24.0)), ScalingCurve((0, 2, 3), (0.0, 18.0, 20.0))
CURVES = (*WITH_0, ScalingCurve((1, 2), (6.0, 15.0)))


def bound(trace: Trace, curves: tuple[ScalingCurve, ...], up_s: float, down_s: float) -> float:
    shared = [
        trainer(f't{i}', high=3, up_s=up_s, down_s=down_s, curve=curve).trainer
        for i, curve in enumerate(curves)
    ]
    return most_samples(trace, False, shared, len(shared))


def test_growth_and_a_loss_are_counted() -> None:
    trace = trace_of(('a', 0, 1000), ('b', 100, 700), ('c', 100, 700), end_s=1000)
    # Both at the cheaper of the two costs, of the rate before.
    best = 100 * 10 + 600 * 24 + 300 * 10 - 2 * 10 - 2 * 24
    assert bound(trace, CURVES[:1], 3, 2) == pytest.approx(best)
    assert bound(trace, CURVES[:1], 3, 0) == pytest.approx(best + 2 * 10 + 2 * 24)


def test_a_node_that_is_taken_and_given_back_in_one_instant_is_counted() -> None:
    trace = trace_of(('a', 0, 500), ('a', 500, 1000), end_s=1000)
    assert bound(trace, CURVES[:1], 3, 2) == pytest.approx(1000 * 10 - 2 * 10)


def best_of_all(
    trace: Trace, curves: tuple[ScalingCurve, ...], up_s: float, down_s: float
) -> float:
    """What the best decisions at the instants of the trace train: all of them are tried."""

    def cost(i: int, before: set[str], after: set[str], left: set[str]) -> float:
        if not before or (before == after and not before & left):
            return 0.0
        grows = not before & left and len(after) >= len(before)
        return (up_s if grows else down_s) * curves[i].rate_at(len(before))

    starts, ends, nodes, _ = trace.intervals()
    at = sorted({*starts, *ends, trace.end_s})
    mine = range(len(curves))
    best: dict[tuple[frozenset[str], ...], float] = {tuple(frozenset() for _ in mine): 0.0}
    for now, then in itertools.pairwise(at):
        idle = [trace.names[n] for n in nodes[(starts <= now) & (ends > now)]]
        left = {trace.names[n] for n in nodes[ends == now]}
        after = {}
        for of_node in itertools.product(range(-1, len(curves)), repeat=len(idle)):
            given = list(zip(idle, of_node, strict=True))
            held = tuple(frozenset(n for n, who in given if who == i) for i in mine)
            trained = (then - now) * sum(
                curve.rate_at(len(has)) for curve, has in zip(curves, held, strict=True)
            )
            after[held] = trained + max(
                worth - sum(cost(i, set(old[i]), set(held[i]), left) for i in mine)
                for old, worth in best.items()
            )
        best = after
    return max(best.values())


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    rows: list[Interval] = []
    for name in 'abc'[: draw(st.integers(1, 3))]:
        at = sorted(draw(st.lists(st.integers(0, 4), min_size=2, max_size=4, unique=True)))
        rows += [(name, 3.0 * s, 3.0 * e) for s, e in itertools.pairwise(at) if draw(st.booleans())]
    return trace_of(*(rows or [('a', 0.0, 12.0)]), end_s=12.0)


@holds_for(
    traces(),
    st.lists(st.sampled_from(CURVES), min_size=1, max_size=2).map(tuple),
    st.integers(0, 6),
    st.integers(0, 6),
    tries=60,
)
def test_no_decisions_exceed_it(
    trace: Trace, curves: tuple[ScalingCurve, ...], up_s: int, down_s: int
) -> None:
    best = best_of_all(trace, curves, up_s, down_s)
    assert best <= bound(trace, curves, up_s, down_s) * (1 + 1e-9) + 1e-6
