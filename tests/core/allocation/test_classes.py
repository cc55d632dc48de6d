"""Node classes: every exact solver against brute force, and against the MILP on larger problems."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.feasibility import by_place, is_allowed, stay_put
from parsl_freetrain.core.allocation.problem import Allocator, Answer, Bid, Capacity, Problem
from parsl_freetrain.core.allocation.solvers.column_generation import ColumnAllocator
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.equal_share import EqualShareAllocator
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.allocation.solvers.mixed_classes import MixedAllocator
from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.solver import allocator_named
from tests.core.allocation.test_allocation import check_against_brute_force
from tests.support import allocation as support
from tests.support.class_problems import class_problem
from tests.support.properties import holds_for
from tests.support.waiting import LIMIT_S

MILP, COLUMNS, DP = MilpAllocator(LIMIT_S), ColumnAllocator(LIMIT_S), DpAllocator()
NAMES = ('a100', 'a40', 'cpu')
# The block ends too soon for t1, which may keep all that it has, or nothing.
HELD = [
    support.bid(f't{n}', n, held=(n, 0), shortest_s=n - 1.0, current_class='a40') for n in (1, 3)
]
ENDING = Problem(10.0, 3, (*HELD,), (Capacity('b0', 3, 1.0, 'a40'), Capacity('b1', 0, 1.0, 'a100')))


@holds_for(
    support.problems_with_blocks(names=NAMES)
    | support.problems_with_blocks(names=NAMES, ends=(math.inf,)),
    tries=60,
)
def test_every_solver_finds_the_best_of_all_allocations(problem: Problem) -> None:
    solvers: list[Allocator] = [MILP]
    solvers += [s for s in (DP, COLUMNS) if s.applies(problem)]
    check_against_brute_force(problem, solvers)


def allowed(problem: Problem, most: int) -> None:
    for _, allocation in zip(range(most), support.feasible(problem), strict=False):
        worth = support.second_by_second(problem, allocation)
        near = pytest.approx(worth, rel=1e-9, abs=1e3 * support.rounding(problem))
        assert problem.objective(allocation) == near and is_allowed(problem, allocation)


@holds_for(support.problems_with_blocks(names=NAMES), tries=25)
def test_what_is_said_about_an_allocation(problem: Problem) -> None:
    allowed(problem, 100)
    assert is_allowed(replace(problem, limits=()), stay_put(problem))
    shared = EqualShareAllocator().allocate(problem)
    if shared.status != 'infeasible':
        support.assert_valid(problem, shared)


@pytest.mark.parametrize('seed', range(2))
def test_column_generation_agrees_with_the_milp_where_enumeration_ends(seed: int) -> None:
    problem = class_problem(random.Random(seed), trainers=12, nodes=16)
    assert COLUMNS.applies(problem)
    found, reference = COLUMNS.allocate(problem), MILP.allocate(problem)
    support.assert_valid(problem, found)
    assert found.objective == pytest.approx(reference.objective, rel=1e-9)


def in_mixes(problem: Problem, parts: int) -> Problem:
    """The same problem, where trainers with curves by class may mix them."""
    return replace(
        problem,
        bids=tuple(
            replace(
                bid,
                mixed_parts=parts,
                current_mix=((bid.current_class, bid.current_nodes),) if bid.current_nodes else (),
            )
            if bid.class_curves
            else bid
            for bid in problem.bids
        ),
    )


@example(ENDING, 1)
@holds_for(support.problems_with_blocks(names=NAMES[:2]), st.integers(1, 9), tries=60)
def test_mixes_of_classes_are_the_best_of_all_allocations(problem: Problem, parts: int) -> None:
    problem = in_mixes(problem, parts)
    allowed(problem, 30)
    check_against_brute_force(problem, [MixedAllocator(60.0)])
    held = MixedAllocator(60.0).allocate(problem)
    if held.status == 'optimal':  # and from there, with a mix that it holds
        there = by_place(problem, held)
        bids = (
            replace(
                bid,
                held=there[bid.name],
                current_nodes=sum(there[bid.name]),
                current_class=next(iter(problem.classes_of(there[bid.name])), ''),
                current_mix=tuple(
                    (name, sum(there[bid.name][b] for b in problem.places_by_class[name]))
                    for name in problem.classes_of(there[bid.name])
                    if bid.mixed_parts
                ),
            )
            for bid in problem.bids
        )
        check_against_brute_force(replace(problem, bids=tuple(bids)), [MixedAllocator(60.0)])


def test_a_trainer_on_two_classes_divides_batches_by_speed_as_far_as_the_parts_allow() -> None:
    def on(parts: int) -> Answer:
        fast, slow = (ScalingCurve.from_points({1: rate, 2: 2 * rate}) for rate in (1.0, 0.5))
        net = Bid('net', 1, 2, 0, 0, 0, fast, class_curves=(('a', fast), ('b', slow)))
        blocks = Capacity('x', 1, node_class='a'), Capacity('y', 1, node_class='b')
        mixed = replace(net, mixed_parts=parts)
        return allocator_named('auto', isolated=False).allocate(Problem(100, 2, (mixed,), blocks))

    assert on(6).by_block == {'net': {'x': 1, 'y': 1}}
    assert on(6).objective == 150
    assert on(4).objective == pytest.approx(400 / 3)  # 3 : 1
    assert on(1).objective == 100


def test_a_large_problem_of_mixes_is_no_worse_than_one_class_at_a_time() -> None:
    problem = class_problem(random.Random(3), trainers=12, nodes=16)
    mixed = MixedAllocator(60.0, most_ways=8000).allocate(in_mixes(problem, 64))
    assert mixed.status == 'feasible'
    assert mixed.objective >= 0.98 * COLUMNS.allocate(problem).objective
    assert mixed.bound is not None
    assert mixed.bound >= mixed.objective
