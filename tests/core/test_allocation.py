"""The count MILP against brute force, and against the known faults of the published solver."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsl_freetrain.core.allocation import Answer, Bid, Problem
from parsl_freetrain.core.milp import MilpAllocator, choices, stay_put
from parsl_freetrain.core.words import ScalingCurve

DECISIONS = Path(__file__).resolve().parents[2].parent / 'shared' / 'data' / 'allocation'
LINEAR = ScalingCurve.from_points({1: 10.0, 64: 640.0})


def bid(name: str, current: int = 0, low: int = 1, high: int = 64, curve: ScalingCurve = LINEAR,
        up_s: float = 18.0, down_s: float = 12.0) -> Bid:
    return Bid(name, low, high, current, up_s, down_s, curve)


def feasible(problem: Problem) -> Iterator[dict[str, int]]:
    """Every allocation that the rules allow, written down independently of the solver's own ``choices``."""
    per_bid = [[n for n in range(problem.nodes + 1) if n == 0 or b.min_nodes <= n <= b.max_nodes] for b in problem.bids]
    for counts in itertools.product(*per_bid):
        if sum(counts) <= problem.nodes:
            yield {b.name: n for b, n in zip(problem.bids, counts, strict=True)}


def by_hand(problem: Problem, allocation: dict[str, int]) -> float:
    """The objective, spelled out as design.md's contract of ``freetrain allocate`` has it."""
    total = 0.0
    for b in problem.bids:
        points = {0: 0.0} | dict(zip(b.curve.nodes, b.curve.rate, strict=True))
        n, c = allocation[b.name], b.current_nodes
        now = linear(points, c) if c >= b.min_nodes else 0.0
        total += problem.horizon_s * linear(points, n)
        total -= (b.rescale_up_s if n > c else b.rescale_down_s if n < c else 0.0) * now
    return total


def linear(points: dict[int, float], n: int) -> float:
    xs = sorted(points)
    if n >= xs[-1]:
        return points[xs[-1]]
    left = max(x for x in xs if x <= n)
    right = min(x for x in xs if x > n)
    return points[left] + (points[right] - points[left]) * (n - left) / (right - left)


def assert_valid(problem: Problem, answer: Answer) -> None:
    assert set(answer.allocation) == {b.name for b in problem.bids}
    assert sum(answer.allocation.values()) <= problem.nodes
    for b in problem.bids:
        n = answer.allocation[b.name]
        assert n == 0 or b.min_nodes <= n <= b.max_nodes
    assert answer.objective == pytest.approx(by_hand(problem, answer.allocation), rel=1e-12, abs=1e-12)


def assert_not_worse_than_staying(problem: Problem, answer: Answer) -> None:
    assert_valid(problem, answer)
    assert answer.objective >= problem.objective(stay_put(problem))


@st.composite
def curves(draw: st.DrawFn) -> ScalingCurve:
    """Any shape: convex, dips, flat, no point at 0, ending before or behind the pool; large and small units."""
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True).map(sorted))
    unit = draw(st.sampled_from([1e-3, 1.0, 2831.0, 1e6]))
    rates = draw(st.lists(st.integers(0, 40), min_size=len(counts), max_size=len(counts)))
    return ScalingCurve(tuple(counts), tuple(0.0 if n == 0 else unit * r for n, r in zip(counts, rates, strict=True)))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    nodes = draw(st.integers(0, 8))
    bids = []
    for j in range(draw(st.integers(1, 4))):
        low = draw(st.integers(1, 5))
        bids.append(Bid(f't{j}', low, draw(st.integers(low, 12)), draw(st.integers(0, 12)),
                        draw(st.sampled_from([0.0, 0.7, 18.0, 500.0])), draw(st.sampled_from([0.0, 0.3, 12.0, 500.0])),
                        draw(curves())))
    if draw(st.booleans()):  # equal trainers
        bids = [Bid(f't{j}', *list(vars(bids[0]).values())[1:]) for j in range(len(bids))]
    return Problem(draw(st.sampled_from([0.5, 10.0, 120.0, 3600.0])), nodes, tuple(bids))


@settings(max_examples=300, deadline=None, database=None)
@given(problems())
def test_the_answer_is_the_optimum_of_all_feasible_allocations(problem: Problem) -> None:
    answer = MilpAllocator().allocate(problem)
    best = max(by_hand(problem, allocation) for allocation in feasible(problem))
    assert answer.status == 'optimal'
    assert_not_worse_than_staying(problem, answer)
    assert answer.objective == pytest.approx(best, rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None, database=None)
@given(problems())
def test_staying_is_feasible_and_preferred_among_equals(problem: Problem) -> None:
    staying = stay_put(problem)
    assert staying in list(feasible(problem))
    best = max(by_hand(problem, allocation) for allocation in feasible(problem))
    if by_hand(problem, staying) >= best:
        assert MilpAllocator().allocate(problem).allocation == staying


def test_equal_trainers_do_not_swap_nodes_even_when_rescaling_is_free() -> None:
    problem = Problem(120.0, 6, (bid('a', 4, high=4, up_s=0, down_s=0), bid('b', 2, high=4, up_s=0, down_s=0)))
    assert MilpAllocator().allocate(problem).allocation == {'a': 4, 'b': 2}


def test_a_rescale_must_pay_within_the_horizon() -> None:
    # One node more is worth 10 samples/s; growing costs 18 s of the present 80 samples/s: it pays after 144 s.
    for horizon_s, nodes in ((143.0, 8), (145.0, 9)):
        answer = MilpAllocator().allocate(Problem(horizon_s, 9, (bid('a', 8),)))
        assert answer.allocation == {'a': nodes}


def test_no_cap_at_half_of_the_nodes() -> None:
    for nodes in (10, 20, 40, 64):
        answer = MilpAllocator().allocate(Problem(10.0, nodes, (bid('a'),)))
        assert answer.allocation == {'a': nodes}


def test_giving_up_more_than_half_of_the_nodes_at_once() -> None:
    strong = ScalingCurve.from_points({1: 100.0, 64: 6400.0})
    answer = MilpAllocator().allocate(Problem(600.0, 64, (bid('a', 64), bid('b', curve=strong))))
    assert answer.allocation == {'a': 0, 'b': 64}


@pytest.mark.parametrize('curve', [ScalingCurve((1, 2, 4), (10.0, 19.0, 36.0)), ScalingCurve((2, 4), (19.0, 36.0))])
def test_more_trainers_than_nodes_without_a_point_for_zero(curve: ScalingCurve) -> None:
    problem = Problem(10.0, 2, tuple(bid(name, curve=curve) for name in ('a', 'b', 'c')))
    answer = MilpAllocator().allocate(problem)
    assert answer.status == 'optimal'
    assert sum(answer.allocation.values()) == 2
    assert_valid(problem, answer)


def test_points_of_a_curve_are_sorted_together() -> None:
    # Sorted apart, counts and rates of a curve with a dip would be paired anew.
    curve = ScalingCurve.from_points({8: 40.0, 1: 10.0, 4: 60.0, 2: 20.0})
    answer = MilpAllocator().allocate(Problem(120.0, 8, (bid('a', high=8, curve=curve),)))
    assert answer.allocation == {'a': 4}
    assert answer.objective == 120.0 * 60.0


def test_no_bids_and_no_nodes() -> None:
    assert MilpAllocator().allocate(Problem(120.0, 5, ())).allocation == {}
    answer = MilpAllocator().allocate(Problem(120.0, 0, (bid('a', 3), bid('b'))))
    assert answer.allocation == {'a': 0, 'b': 0}
    assert answer.objective == -12.0 * 30.0


BUSY = Problem(120.0, 40, tuple(bid(f't{j}', current=3 if j < 12 else 0) for j in range(20)))
SHRUNK = Problem(120.0, 10, BUSY.bids)


class Breaking(MilpAllocator):
    """The solver's library raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def _solve(self, problem: Problem) -> tuple[str, dict[str, int]]:
        raise self.error


@pytest.mark.parametrize('problem', [BUSY, SHRUNK], ids=['same nodes', 'fewer nodes'])
@pytest.mark.parametrize('allocator', [
    MilpAllocator(time_limit_s=0.0), MilpAllocator(time_limit_s=1e-9), MilpAllocator(time_limit_s=0.002),
    Breaking(pulp.PulpSolverError('no licence')), Breaking(OSError('out of memory')),
], ids=['no time', 'next to no time', 'little time', 'solver error', 'other error'])
def test_without_a_result_what_runs_goes_on(allocator: MilpAllocator, problem: Problem) -> None:
    answer = allocator.allocate(problem)
    assert answer.status in {'feasible', 'optimal'}
    assert_not_worse_than_staying(problem, answer)
    assert sum(answer.allocation.values()) >= sum(stay_put(problem).values()) > 0


class Worse(MilpAllocator):
    """The solver stops at an answer that takes every node away, as the published one does when time runs out."""

    def _solve(self, problem: Problem) -> tuple[str, dict[str, int]]:
        return 'feasible', dict.fromkeys((b.name for b in problem.bids), 0)


def test_an_answer_worse_than_staying_is_not_taken() -> None:
    answer = Worse().allocate(BUSY)
    assert answer.status == 'feasible'
    assert answer.allocation == stay_put(BUSY)


def test_stay_put_keeps_the_first_ones_when_nodes_are_gone() -> None:
    problem = Problem(120.0, 5, (bid('a', 3), bid('b', 4, low=3), bid('c', 2), bid('d', 70)))
    assert stay_put(problem) == {'a': 3, 'b': 0, 'c': 2, 'd': 0}


def test_choices_are_none_or_the_range_within_the_pool() -> None:
    assert choices(bid('a', low=3, high=5), 4) == [0, 3, 4]
    assert choices(bid('a', low=3, high=5), 2) == [0]
    assert choices(bid('a', low=0, high=2), 9) == [0, 1, 2]


def recorded(count: int) -> list[object]:
    """Real decisions from the Summit trace, evenly picked; a skipped one where absent."""
    files = DECISIONS / 'summit-decisions.jsonl.gz', DECISIONS / 'summit-decisions-answers.jsonl.gz'
    if not all(path.exists() for path in files):
        why = pytest.mark.skip(reason=f'{files[0].name} and its answers are not in {DECISIONS}')
        return [pytest.param('', 0.0, id='absent', marks=why)]
    with gzip.open(files[0], 'rt') as lines, gzip.open(files[1], 'rt') as answers:
        both = [(line, json.loads(answer)) for line, answer in zip(lines, answers, strict=True)]
    step = max(len(both) // count, 1)
    return [pytest.param(line, answer['optimum'], id=answer['id']) for line, answer in both[::step][:count]]


@pytest.mark.parametrize(('line', 'optimum'), recorded(25))
def test_recorded_decisions_of_summit_get_their_optimum(line: str, optimum: float) -> None:
    data = json.loads(line)
    problem = Problem(data['horizon_s'], data['nodes'], tuple(
        Bid(t['name'], t['min_nodes'], t['max_nodes'], t['current_nodes'], t['rescale_up_s'], t['rescale_down_s'],
            ScalingCurve(tuple(t['nodes']), tuple(t['rate']))) for t in data['trainers']))
    answer = MilpAllocator(time_limit_s=60.0).allocate(problem)
    assert answer.status == 'optimal'
    assert_valid(problem, answer)
    assert math.isclose(answer.objective, optimum, rel_tol=1e-9)
