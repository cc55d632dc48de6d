"""Solvers by name."""

from dataclasses import replace

import pytest

from parsl_freetrain.core.allocation.problem import Capacity, Limit, Problem
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.solver import allocator_named, close_allocator
from tests.support.allocation import bid
from tests.support.solvers import children

SIMPLE = Problem(120.0, 8, (bid('a', 2), bid('b', 3), bid('c')))
TOGETHER = replace(SIMPLE, limits=(Limit(('a', 'b'), most=4),))
ENDING = replace(SIMPLE, blocks=(Capacity('x', 5, 60.0), Capacity('y', 3)))


def test_who_answers() -> None:
    for name, problem, solver in (
        ('auto', SIMPLE, 'dp'),
        ('auto', TOGETHER, 'milp'),
        ('auto', ENDING, 'columns'),
        ('auto', replace(ENDING, spans_blocks=False), 'milp'),
        ('dp', SIMPLE, 'dp'),
        ('milp', SIMPLE, 'milp'),
        ('milp', ENDING, 'milp'),
        ('equal-share', SIMPLE, 'equal-share'),
        ('equal-share', ENDING, 'equal-share'),
    ):
        allocator = allocator_named(name, isolated=False)
        assert allocator.allocate(problem).solver == solver
        close_allocator(allocator)


def test_auto_starts_a_process_only_when_it_needs_the_milp() -> None:
    allocator = allocator_named('auto')
    assert allocator.allocate(SIMPLE).solver == 'dp'
    assert children() == []
    answer = allocator.allocate(TOGETHER)
    assert len(children()) == 1
    close_allocator(allocator)
    assert children() == []
    assert (
        answer.allocation == allocator_named('milp', isolated=False).allocate(TOGETHER).allocation
    )


def test_an_unknown_name_and_a_bad_limit() -> None:
    with pytest.raises(BadInput, match="'greedy'; choose one of auto, milp, dp, equal-share"):
        allocator_named('greedy')
    with pytest.raises(BadInput, match='time limit'):
        allocator_named('auto', time_limit_s=float('nan'))
