"""Pricing, which prices all trainers at once, against all ways one by one; and branch and price."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.problem import Bid, Problem
from parsl_freetrain.core.allocation.solution import grouped, groups_of
from parsl_freetrain.core.allocation.solvers.column_generation import ColumnAllocator
from parsl_freetrain.core.allocation.solvers.column_pricing import Pricing
from tests.support.allocation import problems_with_blocks, rounding
from tests.support.properties import holds_for


def changed_worth(problem: Problem, bid: Bid, way: tuple[int, ...]) -> float:
    """Worth of a way that counts as a change, also where it is what the bid holds."""
    worth = problem.value(bid, way)
    return worth - bid.rescale_up_s * bid.current_rate if way == problem.held(bid) else worth


@holds_for(problems_with_blocks(), st.data(), tries=100)
def test_pricing_finds_the_best_of_all_ways(problem: Problem, data: st.DataObject) -> None:
    assume(ColumnAllocator().applies(problem))
    problem = grouped(problem, groups_of(problem))
    pricing = Pricing(problem)
    shape = len(problem.bids), len(problem.places)
    unit = max(max(bid.curve.rate) for bid in problem.bids)

    def drawn(values: st.SearchStrategy[int]) -> np.ndarray:
        size = shape[0] * shape[1]
        flat = data.draw(st.lists(values, min_size=size, max_size=size))
        return np.array(flat).reshape(shape)

    def close(value: float) -> object:
        return pytest.approx(value, rel=1e-12, abs=1e3 * rounding(problem))

    prices = drawn(st.integers(0, 20)) * unit * problem.horizon_s / 20
    region = pricing.region
    if data.draw(st.booleans()):  # as in a branch
        region = replace(
            region,
            keep=region.keep & drawn(st.integers(0, 1))[:, 0].astype(bool),
            low=drawn(st.integers(0, 2))[:, 0],
            high=np.minimum(region.high, drawn(st.integers(0, 9))[:, 0]),
            least=drawn(st.integers(0, 1)),
            most=np.minimum(region.most, drawn(st.integers(0, 5))),
        ).within(drawn(st.integers(1, 9)), pricing.held)
    best, ways, kept = pricing.best(prices, region)
    every = np.array(list(product(*(range(place.nodes + 1) for place in problem.places))))
    for j, bid in enumerate(problem.bids):
        same = np.full(len(every), j)
        usable = [bid.usable(sum(way)) == sum(way) for way in every.tolist()]
        inside = region.has(same, every, np.zeros(len(every), dtype=bool)) & usable
        worths = {
            (tuple(way), False): changed_worth(problem, bid, tuple(way))
            for way in every[inside].tolist()
        }
        if region.keep[j]:
            worths[problem.held(bid), True] = problem.value(bid, problem.held(bid))
        if not worths:
            assert best[j] == -np.inf
            continue
        paid = {key: worth - float(prices[j] @ key[0]) for key, worth in worths.items()}
        assert best[j] == close(max(paid.values()))
        assert best[j] == close(paid[tuple(ways[j].tolist()), bool(kept[j])])
        if not kept[j]:
            worth = pricing.worth(np.array([j]), ways[None, j])[0]
            assert worth == close(worths[tuple(ways[j].tolist()), False])
