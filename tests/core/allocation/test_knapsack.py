"""The search with prices against the textbook dynamic programme; a solver that remembers."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.problem import Answer, Bid, Problem
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.knapsack import Floats, best_counts
from parsl_freetrain.core.model.types import ScalingCurve
from tests.support.properties import holds_for


def textbook(values: Floats, nodes: int) -> float:
    """The best sum for each number of nodes used so far; minus infinity where nothing fits."""
    best = np.zeros(nodes + 1)
    for row in values:
        new = np.full(nodes + 1, -np.inf)
        for count, value in enumerate(row[: nodes + 1]):
            if np.isfinite(value):
                new[count:] = np.maximum(new[count:], best[: nodes + 1 - count] + value)
        best = new
    return float(best.max())


def bumpy(draw: np.random.Generator, trainers: int, most: int) -> Floats:
    """Near-linear values with noise: many choices that are almost equally good."""
    return np.arange(most + 1) * draw.uniform(0.9, 1.1, (trainers, 1)) + draw.normal(
        0.0, 0.3, (trainers, most + 1)
    )


def any_shape(draw: np.random.Generator, trainers: int, most: int) -> Floats:
    sizes = 10.0 ** draw.integers(-2, 3, (trainers, 1))
    return draw.uniform(-1.0, 1.0, (trainers, most + 1)) * sizes


def few_sizes(draw: np.random.Generator, trainers: int, most: int) -> Floats:
    values = bumpy(draw, trainers, most)
    values[draw.random(values.shape) < 0.8] = -np.inf
    values[:, 0] = 0.0
    return values


def no_zero(draw: np.random.Generator, trainers: int, most: int) -> Floats:
    """Some have to get something, and not all of that may fit."""
    values = few_sizes(draw, trainers, most)
    values[draw.random(trainers) < 0.2, 0] = -np.inf
    return values


def equal(draw: np.random.Generator, trainers: int, most: int) -> Floats:
    return np.tile(draw.integers(0, 4, most + 1).cumsum().astype(float), (trainers, 1))


def whole(draw: np.random.Generator, trainers: int, most: int) -> Floats:
    """Small integers: ties everywhere."""
    return draw.integers(-3, 9, (trainers, most + 1)).astype(float)


@pytest.mark.parametrize('kind', [bumpy, any_shape, few_sizes, no_zero, equal, whole])
def test_as_good_as_the_textbook(kind: Callable[[np.random.Generator, int, int], Floats]) -> None:
    draw = np.random.default_rng(7)
    fits = 0
    for _ in range(120):
        trainers, most = int(draw.integers(1, 13)), int(draw.integers(0, 12))
        values = kind(draw, trainers, most)
        nodes = int(draw.integers(0, trainers * most + 2))
        counts, optimum = best_counts(values, nodes), textbook(values, nodes)
        if counts is None:
            assert optimum == -np.inf
            continue
        fits += 1
        assert counts.sum() <= nodes
        found = values[np.arange(trainers), counts].sum()
        assert found == pytest.approx(optimum, rel=1e-12, abs=1e-12)
    assert fits > 40


BENT = ScalingCurve((1, 2, 4), (10.0, 17.0, 27.0)), ScalingCurve((1, 3, 4), (5.0, 6.0, 90.0))
CURVES = (ScalingCurve((1, 8), (10.0, 80.0)), *BENT)
BIDS = st.builds(
    lambda low, more, held, curve, fixed: Bid(
        '', low, low + more, min(held, low + more), 3.0, 2.0, curve, fixed=fixed
    ),
    st.integers(1, 3),
    st.integers(0, 9),
    st.sampled_from([0, 0, 1, 2, 5]),
    st.sampled_from(CURVES),
    st.sampled_from([False, False, False, True]),
)
ONE_OR_TWO = st.lists(st.tuples(st.integers(0, 4), BIDS), min_size=1, max_size=2)
KINDS = st.sampled_from(['same', 'same', 'same', 'one more', 'one less'])
HORIZONS = st.sampled_from([120.0, 120.0, 120.0, 60.0])
CHANGES = st.tuples(st.integers(4, 30), ONE_OR_TWO, KINDS, HORIZONS)


def timeless(answer: Answer) -> Answer:
    return replace(answer, seconds=0.0)


@holds_for(
    st.lists(BIDS, min_size=1, max_size=5), st.lists(CHANGES, min_size=2, max_size=8), tries=150
)
def test_what_was_asked_before_does_not_matter(
    first: list[Bid], changes: list[tuple[int, list[tuple[int, Bid]], str, float]]
) -> None:
    allocator = DpAllocator()
    bids = [replace(bid, name=f't{j}') for j, bid in enumerate(first)]
    for nodes, changed, size, horizon_s in changes:
        if size == 'one more':
            bids.append(replace(first[0], name=f't{len(bids)}'))
        elif size == 'one less':
            bids = bids[:-1]
        for j, bid in changed:
            if bids:
                bids[j % len(bids)] = replace(bid, name=bids[j % len(bids)].name)
        problem = Problem(horizon_s, nodes, tuple(bids))
        assert timeless(allocator.allocate(problem)) == timeless(DpAllocator().allocate(problem))
