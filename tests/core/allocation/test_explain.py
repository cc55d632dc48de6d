"""Explanations against exhaustive search, and the figures that they are made of."""

import functools
import math

import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.explain import Alternative, Explanation, Reason, explain
from parsl_freetrain.core.allocation.problem import Allocator, Answer, Bid, Capacity, Limit, Problem
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.equal_share import EqualShareAllocator
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.model.types import ScalingCurve
from tests.support import allocation
from tests.support.allocation import feasible
from tests.support.properties import holds_for

TWICE = ScalingCurve.from_points({1: 10.0, 2: 20.0, 4: 30.0})


bid = functools.partial(allocation.bid, high=4, curve=TWICE, up_s=5.0, down_s=3.0)


def explained(problem: Problem, allocator: Allocator) -> tuple[Answer, Explanation]:
    answer = allocator.allocate(problem)
    return answer, explain(problem, answer, allocator)


def check_alternatives(problem: Problem, answer: Answer, explanation: Explanation) -> None:
    """Each alternative is the best of all allocations in which the trainer has another count."""
    every = [
        (problem.objective(a), {name: sum(nodes) for name, nodes in a.items()})
        for a in feasible(problem)
    ]
    for reason in explanation.reasons:
        name = reason.trainer
        values = [(worth, counts[name]) for worth, counts in every if counts[name] != reason.nodes]
        if not values:
            assert reason.alternative is None
            continue
        best = max(worth for worth, _ in values)
        alternative = reason.alternative
        assert alternative is not None
        assert alternative.objective == pytest.approx(best, rel=1e-9, abs=1e-6)
        near = best - 1e-6 - 1e-9 * abs(best)
        assert alternative.nodes in {n for worth, n in values if worth >= near}
        assert alternative.worse_by == pytest.approx(answer.objective - best, rel=1e-9, abs=1e-6)
        assert alternative.worse_by >= 0


def test_what_a_trainer_gains_and_what_its_rescale_costs() -> None:
    only_four = bid('b', low=4, curve=ScalingCurve((4,), (1.0,)))
    problem = Problem(100.0, 4, (bid('a', current=1), only_four))
    answer, explanation = explained(problem, DpAllocator())
    assert answer.allocation == {'a': 4, 'b': 0}
    gain = {'worth_before': 1000.0, 'worth': 2950.0, 'gain': 1950.0, 'rescale_cost': 50.0}
    other = Alternative(3, 2450.0, 500.0)
    assert explanation.reasons[0] == Reason('a', 1, 4, **gain, alternative=other)
    # b alone on all four nodes: a shrinks to none at a cost of 3 s of its 10 per second
    assert explanation.reasons[1].alternative == Alternative(4, 100.0 - 30.0, 2950.0 - 70.0)


def test_limits_say_how_far_they_are_used() -> None:
    limits = Limit(('a',), most=2, why='user anna'), Limit(node_s=500.0, why='budget')
    problem = Problem(100.0, 8, (bid('a'), bid('b')), limits=limits)
    _, explanation = explained(problem, DpAllocator())
    anna, budget = explanation.limits
    assert (anna.why, anna.nodes, anna.most, anna.most_node_s) == ('user anna', 2, 2, None)
    assert (budget.why, budget.nodes) == ('budget', 5)
    assert (budget.node_s, budget.most_node_s) == (500.0, 500.0)


def test_a_better_alternative_is_told_where_the_answer_was_not_optimal() -> None:
    steep = ScalingCurve.from_points({1: 1.0, 4: 100.0})
    problem = Problem(100.0, 4, (bid('a', curve=steep), bid('b', curve=steep)))
    answer = EqualShareAllocator().allocate(problem)
    assert answer.allocation == {'a': 2, 'b': 2}
    alternative = explain(problem, answer, DpAllocator()).reasons[0].alternative
    assert alternative == Alternative(4, 10000.0, answer.objective - 10000.0)


def test_trainers_that_are_alike_but_for_a_limit_are_not_confused() -> None:
    both, share = (bid('a', high=2), bid('b', high=2)), Limit(('b',), least=2, why='share of b')
    _, explanation = explained(Problem(100.0, 9, both, limits=(share,)), DpAllocator())
    alternatives = [reason.alternative for reason in explanation.reasons]
    assert alternatives == [Alternative(1, 3000.0, 1000.0), None]


@st.composite
def problems(draw: st.DrawFn, ends: bool) -> Problem:
    sizes = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(2, 2)) if ends else 1)]
    left = list(sizes)
    bids = []
    for j in range(draw(st.integers(1, 3 if not ends else 2))):
        low = draw(st.integers(1, 2))
        values = st.integers(0, 40).map(float)
        rates = draw(st.dictionaries(st.integers(1, 6), values, min_size=1, max_size=4))
        held = tuple(draw(st.integers(0, rest)) for rest in left)
        left = [rest - n for rest, n in zip(left, held, strict=True)]
        high, curve = draw(st.integers(low, 5)), ScalingCurve.from_points(rates)
        costs = draw(st.sampled_from([0.0, 5.0, 200.0])), draw(st.sampled_from([0.0, 3.0]))
        mine, fixed = held if ends else (), draw(st.booleans())
        bids.append(Bid(f't{j}', low, high, sum(held), *costs, curve, mine, (), fixed))
    blocks = (
        tuple(
            Capacity(f'b{i}', n, draw(st.sampled_from([math.inf, 40.0])))
            for i, n in enumerate(sizes)
        )
        if ends
        else ()
    )
    limits = [Limit(most=draw(st.integers(0, 6)))] if draw(st.booleans()) else []
    return Problem(100.0, sum(sizes), tuple(bids), blocks, draw(st.booleans()), tuple(limits))


@holds_for(problems(ends=False), tries=100)
def test_alternatives_are_the_best_ones(problem: Problem) -> None:
    check_alternatives(problem, *explained(problem, DpAllocator()))


@holds_for(problems(ends=True), tries=25)
def test_alternatives_are_the_best_ones_with_blocks_that_end(problem: Problem) -> None:
    check_alternatives(problem, *explained(problem, MilpAllocator()))
