"""The search with prices against the textbook dynamic programme, on problems too large for brute
force.
"""

from collections.abc import Callable

import numpy as np
import pytest

from parsl_freetrain.core.allocation.solvers.knapsack import Floats, best_counts


def textbook(values: Floats, nodes: int) -> float:
    """The optimum, by the best sum for each number of nodes used so far; minus infinity where
    nothing fits.
    """
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


@pytest.mark.parametrize(('trainers', 'nodes'), [(40, 400), (120, 1000)])
def test_many_trainers(trainers: int, nodes: int) -> None:
    for seed in range(3):
        draw = np.random.default_rng(seed)
        for kind in (bumpy, few_sizes, whole):
            values = kind(draw, trainers, 32)
            counts = best_counts(values, nodes)
            assert counts is not None
            assert values[np.arange(trainers), counts].sum() == pytest.approx(
                textbook(values, nodes), rel=1e-12
            )
