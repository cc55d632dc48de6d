"""Every exact solver against brute force, each other, and known faults of the published one."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pulp
import pytest
from hypothesis import example
from hypothesis import strategies as st

from parsl_freetrain.core.allocation import problem as pb
from parsl_freetrain.core.allocation.feasibility import by_place, is_allowed, stay_put
from parsl_freetrain.core.allocation.solution import Asked, Found, groups_of
from parsl_freetrain.core.allocation.solvers.column_generation import ColumnAllocator
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.equal_share import EqualShareAllocator
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve
from tests.support.allocation import (
    DECISIONS,
    assert_not_worse_than_staying,
    assert_valid,
    bid,
    by_hand,
    feasible,
    problems,
    problems_with_blocks,
    recorded,
    rounding,
    second_by_second,
)
from tests.support.properties import holds_for
from tests.support.waiting import LIMIT_S

# No time limit decides: a minute may be too short on a busy computer.
HIGHS, DP, COLUMNS = MilpAllocator(LIMIT_S), DpAllocator(), ColumnAllocator(LIMIT_S)
# Optimal means: to this part of the objective. MILP solvers stop at tolerances in floating point.
SOLVED = 1e-9
EXACT = [pytest.param(DP, id='dp'), pytest.param(HIGHS, id='HiGHS')]


def check_against_brute_force(problem: pb.Problem, allocators: list[pb.Allocator]) -> None:
    """The best of all that is allowed; where nothing is, what runs is kept."""
    values = [problem.objective(allocation) for allocation in feasible(problem)]
    for allocator in allocators:
        answer = allocator.allocate(problem)
        if not values:
            assert (answer.status, answer.bound, answer.gap) == ('infeasible', None, None)
            assert by_place(problem, answer) == stay_put(problem)
            continue
        assert (answer.status, answer.bound, answer.gap) == ('optimal', answer.objective, 0.0)
        assert_valid(problem, answer)
        assert answer.objective == pytest.approx(max(values), rel=SOLVED, abs=rounding(problem))


@holds_for(problems(), tries=120)
def test_the_optimum_of_all_feasible_allocations_is_found(problem: pb.Problem) -> None:
    check_against_brute_force(problem, [DP, HIGHS])
    best = max(
        by_hand(problem, {name: n for name, (n,) in allocation.items()})
        for allocation in feasible(problem)
    )
    assert DP.allocate(problem).objective == pytest.approx(best, rel=SOLVED, abs=rounding(problem))


MILLIONS, LITTLE_OF = ScalingCurve((3,), (33e6,)), ScalingCurve((0, 7, 8), (0.0, 0.04, 0.0))
LITTLE_BESIDE_MILLIONS = pb.Problem(
    0.5, 4, (bid('t0', curve=LITTLE_OF, up_s=0.0), bid('t1', 1, high=1, curve=MILLIONS))
)


@holds_for(problems(constrained=True), tries=100)
@example(LITTLE_BESIDE_MILLIONS)
def test_sizes_fixed_trainers_and_limits_on_one_or_all(problem: pb.Problem) -> None:
    assert DP.applies(problem)
    check_against_brute_force(problem, [DP, HIGHS])


@holds_for(problems_with_blocks(), tries=120)
def test_blocks_that_end(problem: pb.Problem) -> None:
    others: list[pb.Allocator] = [one for one in (DP, COLUMNS) if one.applies(problem)]
    check_against_brute_force(problem, [HIGHS, *others])


ONE, LITTLE = ScalingCurve((1,), (1e6,)), ScalingCurve((1,), (0.001,))
FIXED = pb.Bid('t0', 1, 1, 1, 0.0, 12.0, ONE, held=(0, 1), sizes=(2,), fixed=True)
ENDING = pb.Capacity('b0', 0, 1.0), pb.Capacity('b1', 1, 1.0)
LOSES_A_THOUSANDTH_BESIDE_MILLIONS = pb.Problem(
    10.0, 1, (FIXED, pb.Bid('t1', 1, 1, 0, 0.0, 0.0, LITTLE)), ENDING, spans_blocks=False
)


@holds_for(problems() | problems(constrained=True) | problems_with_blocks(), tries=100)
@example(LOSES_A_THOUSANDTH_BESIDE_MILLIONS)
def test_the_bound_of_what_is_not_proven_is_a_bound(problem: pb.Problem) -> None:
    best = max(map(problem.objective, feasible(problem)), default=-math.inf)
    for allocator in (EqualShareAllocator(), MilpAllocator(0.0), ColumnAllocator(0.0)):
        if isinstance(allocator, ColumnAllocator) and not allocator.applies(problem):
            continue
        answer = allocator.allocate(problem)
        if answer.status == 'infeasible':
            assert answer.gap is None
            continue
        assert answer.bound is not None and answer.gap is not None
        assert answer.bound >= answer.objective
        assert answer.bound >= best - max(SOLVED * abs(best), rounding(problem))
        assert answer.gap >= 0
        if not isinstance(allocator, EqualShareAllocator):
            assert_not_worse_than_staying(problem, answer)


@pytest.mark.parametrize('time_limit_s', [0.05, 0.5])
def test_the_bound_of_a_milp_without_time_is_a_bound(time_limit_s: float) -> None:
    problem = ending(7, 12, 120, 3)
    answer, best = MilpAllocator(time_limit_s).allocate(problem), COLUMNS.allocate(problem)
    assert answer.bound is not None and best.status == 'optimal'
    assert answer.bound >= best.objective * (1 - 1e-9)


def ending(seed: int, trainers: int, nodes: int, ends: int) -> pb.Problem:
    """Bumpy curves on blocks of equal size, all but one of which end within 120 s, the horizon."""
    draw = random.Random(seed)
    sizes = [nodes // (ends + 1)] * (ends + 1)
    blocks = tuple(
        pb.Capacity(f'b{b}', n, draw.uniform(20, 110) if b < ends else math.inf)
        for b, n in enumerate(sizes)
    )
    left, bids = list(sizes), []
    for j in range(trainers):
        held, b = [0] * len(sizes), draw.randrange(len(sizes))
        held[b] = min(left[b], draw.choice([0, draw.randint(1, 16)]))
        left[b] -= held[b]
        rates = {n: draw.uniform(90, 102) * n ** draw.uniform(0.8, 0.97) for n in (1, 2, 4, 8, 16)}
        curve = ScalingCurve.from_points(rates)
        bids.append(pb.Bid(f't{j}', 1, 16, sum(held), 18.0, 12.0, curve, tuple(held)))
    return pb.Problem(120.0, sum(sizes), tuple(bids), blocks)


@pytest.mark.parametrize(
    ('seed', 'trainers', 'nodes', 'ends'),
    [(1, 4, 24, 1), (4, 6, 60, 1), pytest.param(5, 3, 24, 3, marks=pytest.mark.long)],
)
def test_column_generation_agrees_with_the_milp_where_enumeration_ends(
    seed: int, trainers: int, nodes: int, ends: int
) -> None:
    problem = ending(seed, trainers, nodes, ends)
    columns, milp = COLUMNS.allocate(problem), HIGHS.allocate(problem)
    assert columns.status == milp.status == 'optimal'
    assert_valid(problem, columns)
    assert columns.objective == pytest.approx(milp.objective, rel=1e-9)
    assert columns.objective > columns.staying


def test_the_order_of_blocks_does_not_matter() -> None:
    problem = ending(3, 4, 24, 2)
    bids = tuple(replace(b, held=b.held[::-1]) for b in problem.bids)
    turned = replace(problem, blocks=problem.blocks[::-1], bids=bids)
    for asked in (problem, turned):
        ends = [asked.places[group[0]].remaining_s for group in groups_of(asked)]
        assert ends == sorted(ends)
    here, there = ColumnAllocator(5.0).allocate(problem), ColumnAllocator(5.0).allocate(turned)
    assert here.status == there.status == 'optimal'
    assert here.objective == pytest.approx(there.objective, rel=1e-9)


@holds_for(problems_with_blocks(), tries=120)
def test_worth_with_blocks_is_what_a_walk_through_the_horizon_says(problem: pb.Problem) -> None:
    for allocation in list(feasible(problem))[:30]:
        assert problem.objective(allocation) == pytest.approx(
            second_by_second(problem, allocation), rel=1e-12, abs=rounding(problem)
        )


@holds_for(problems_with_blocks() | problems(constrained=True), st.data(), tries=120)
def test_feasible_and_allowed_are_the_same(problem: pb.Problem, data: st.DataObject) -> None:
    allowed = list(feasible(problem))
    places = [block.nodes for block in problem.places]
    some = {b.name: tuple(data.draw(st.integers(0, n)) for n in places) for b in problem.bids}
    assert is_allowed(problem, some) == (some in allowed)
    for allocation in allowed[:20]:
        assert is_allowed(problem, allocation)


@holds_for(problems_with_blocks() | problems() | problems(constrained=True), tries=120)
def test_staying_is_feasible_but_for_limits(problem: pb.Problem) -> None:
    assert stay_put(problem) in list(feasible(replace(problem, limits=())))


@holds_for(problems(), tries=120)
def test_staying_is_preferred_among_equals(problem: pb.Problem) -> None:
    staying = stay_put(problem)
    best = max(problem.objective(allocation) for allocation in feasible(problem))
    if problem.objective(staying) >= best and abs(best) > 1e4 * rounding(
        problem
    ):  # else equal is not to be told from better
        assert by_place(problem, DP.allocate(problem)) == staying


@holds_for(problems() | problems(constrained=True) | problems_with_blocks(), tries=100)
def test_equal_share_keeps_the_rules(problem: pb.Problem) -> None:
    answer = EqualShareAllocator().allocate(problem)
    if answer.status == 'feasible':
        assert_valid(problem, answer)
    else:
        assert by_place(problem, answer) == stay_put(problem)
        assert problem.limits
    assert EqualShareAllocator().allocate(problem).allocation == answer.allocation


def test_equal_share_as_published() -> None:
    sizes = ('a', 1, 64), ('b', 3, 64), ('c', 1, 1), ('d', 1, 3), ('e', 1, 64)
    five = pb.Problem(120.0, 12, tuple(bid(name, low=low, high=high) for name, low, high in sizes))
    # Two for each; b cannot run on two; what it and c leave goes to the first one.
    found = EqualShareAllocator().allocate(five).allocation
    assert found == {'a': 7, 'b': 0, 'c': 1, 'd': 2, 'e': 2}
    found = EqualShareAllocator().allocate(replace(five, nodes=3)).allocation
    assert found == {'a': 3, 'b': 0, 'c': 0, 'd': 0, 'e': 0}


@pytest.mark.parametrize('allocator', EXACT)
def test_equal_trainers_do_not_swap_nodes_even_when_rescaling_is_free(
    allocator: pb.Allocator,
) -> None:
    free: dict[str, Any] = {'high': 4, 'up_s': 0, 'down_s': 0}
    problem = pb.Problem(120.0, 6, (bid('a', 4, **free), bid('b', 2, **free)))
    assert allocator.allocate(problem).allocation == {'a': 4, 'b': 2}


@pytest.mark.parametrize('allocator', EXACT)
def test_limits_on_trainers_that_do_not_bid(allocator: pb.Allocator) -> None:
    problem = pb.Problem(120.0, 4, (bid('a'),), limits=(pb.Limit(('gone',), most=2),))
    assert allocator.allocate(problem).allocation == {'a': 4}
    gone = replace(problem, limits=(pb.Limit(('gone',), least=1),))
    assert allocator.allocate(gone).status == 'infeasible'


def test_nodes_of_blocks_that_all_last_are_dealt_out_without_moving_anybody() -> None:
    blocks = (pb.Capacity('x', 4, 500.0), pb.Capacity('y', 4), pb.Capacity('z', 4, 900.0))
    curve = ScalingCurve.from_points({n: 10.0 * n**0.5 for n in range(1, 13)})
    all_held: dict[str, tuple[int, ...]] = {'a': (3, 0, 0), 'b': (0, 4, 2), 'c': ()}
    bids = tuple(pb.Bid(k, 1, 12, sum(h), 1.0, 1.0, curve, h) for k, h in all_held.items())
    problem = pb.Problem(120.0, 12, bids, blocks)
    dp, milp = DP.allocate(problem), HIGHS.allocate(problem)
    assert dp.objective == pytest.approx(milp.objective, rel=1e-9)
    for answer in (dp, milp):
        assert_valid(problem, answer)
        for b in bids:
            given, held = by_place(problem, answer)[b.name], problem.held(b)
            changes = [n - h for n, h in zip(given, held, strict=True)]
            assert min(changes) >= 0 or max(changes) <= 0
    # Who shrinks keeps what lasts longest.
    assert dp.by_block['b'] == {'y': 4}


BUSY = pb.Problem(120.0, 40, tuple(bid(f't{j}', current=3 if j < 12 else 0) for j in range(20)))
SHRUNK = pb.Problem(120.0, 10, BUSY.bids)


class Breaking(MilpAllocator):
    """The solver's library raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def _solve(self, problem: pb.Problem, asked: Asked) -> Found:
        raise self.error


class Stopped(MilpAllocator):
    """Stops at an answer that takes every node away, as the published one out of time."""

    def __init__(self, left: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.left = left

    def _solve(self, problem: pb.Problem, asked: Asked) -> Found:
        return Found('feasible', self.left)


@pytest.mark.parametrize('problem', [BUSY, SHRUNK], ids=['same nodes', 'fewer nodes'])
@pytest.mark.parametrize(
    'allocator',
    [
        MilpAllocator(0.0),
        MilpAllocator(1e-9),
        MilpAllocator(0.002),
        Breaking(pulp.PulpSolverError('no licence')),
        Breaking(OSError('out of memory')),
    ],
    ids=['no time', 'next to no time', 'little time', 'solver error', 'other error'],
)
def test_without_a_result_what_runs_goes_on(allocator: pb.Allocator, problem: pb.Problem) -> None:
    answer = allocator.allocate(problem)
    assert answer.status in {'feasible', 'optimal'}
    assert_not_worse_than_staying(problem, answer)
    assert sum(answer.allocation.values()) >= sum(map(sum, stay_put(problem).values())) > 0


@pytest.mark.parametrize('left', [0, 3], ids=['takes all away', 'gives more than there is'])
def test_an_answer_worse_than_staying_or_impossible_is_not_taken(left: int) -> None:
    answer = Stopped({b.name: (left,) for b in BUSY.bids}).allocate(BUSY)
    assert answer.status == 'feasible'
    assert by_place(BUSY, answer) == stay_put(BUSY)


def test_without_time_where_staying_breaks_a_limit_nothing_is_claimed() -> None:
    answer = Breaking(OSError('out of memory')).allocate(replace(BUSY, limits=(pb.Limit(most=5),)))
    assert answer.status == 'infeasible'
    assert by_place(BUSY, answer) == stay_put(BUSY)


def test_stay_put_keeps_the_first_ones_when_nodes_are_gone() -> None:
    problem = pb.Problem(120.0, 5, (bid('a', 3), bid('b', 4, low=3), bid('c', 2), bid('d', 70)))
    assert stay_put(problem) == {'a': (3,), 'b': (0,), 'c': (2,), 'd': (0,)}


def test_staying_gives_up_what_ends_first() -> None:
    blocks = (pb.Capacity('short', 3, 30.0), pb.Capacity('long', 3))
    held = pb.Bid('a', 1, 8, 5, 1.0, 1.0, bid('a').curve, (2, 3), (2, 4))
    assert stay_put(pb.Problem(120.0, 6, (held,), blocks)) == {'a': (1, 3)}


@pytest.mark.parametrize('limit_s', [-1.0, math.nan])
def test_bad_settings_of_the_milp(limit_s: float) -> None:
    with pytest.raises(BadInput, match=str(limit_s)):
        MilpAllocator(limit_s)


def optimum_is_reached(answer: pb.Answer, problem: pb.Problem, optimum: float) -> bool:
    assert answer.status == 'optimal'
    assert_valid(problem, answer)
    return math.isclose(answer.objective, optimum, rel_tol=1e-9)


@pytest.mark.parametrize(
    ('allocator', 'step'), [pytest.param(DP, 1, id='dp'), pytest.param(HIGHS, 30, id='HiGHS')]
)
def test_recorded_decisions_of_summit_get_their_optimum(allocator: pb.Allocator, step: int) -> None:
    decisions = recorded()[::step]
    if not decisions:
        pytest.skip(f'summit-decisions.jsonl.gz and its answers are not in {DECISIONS}')
    solved = [(k, allocator.allocate(p), p, best) for k, p, best in decisions]
    missed = [k for k, found, p, best in solved if not optimum_is_reached(found, p, best)]
    assert missed == []


CURVE = ScalingCurve((0, 1), (0.0, 1.5))


def test_what_is_read_is_what_was_recorded() -> None:
    two = (('gpu', CURVE),)
    bids = (
        pb.Bid('a', 1, 2, 1, 0.5, 0.0, CURVE, (1, 0), (1, 2), fixed=True),
        pb.Bid('b', 1, 2, 0, 0.0, 0.0, CURVE, class_curves=two, mixed_parts=2),
    )
    limits = pb.Limit(('a',), least=1, why='share of user anna'), pb.Limit(most=4)
    blocks = pb.Capacity('x', 3, math.inf), pb.Capacity('y', 2, 30.0, 'gpu')
    problem = pb.Problem(120.0, 5, bids, blocks, spans_blocks=False, limits=limits)
    assert problem.held_fits and problem.seconds  # what is computed is not recorded
    assert pb.problem_in(json.loads(json.dumps(pb.record_of(problem)))) == problem


def test_a_problem_that_is_too_large_is_not_recorded() -> None:
    points = range(pb.MOST_POINTS + 2)
    wide = ScalingCurve(tuple(points), tuple(map(float, points)))
    assert pb.record_of(pb.Problem(1.0, 2, (pb.Bid('a', 1, 2, 0, 0, 0, wide),))) is None
