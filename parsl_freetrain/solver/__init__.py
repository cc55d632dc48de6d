"""Solvers by name, and the child process for solvers that might hang or crash."""

from typing import Protocol

from parsl_freetrain.core.allocation.problem import Allocator, Answer, Problem
from parsl_freetrain.core.allocation.solvers import SolverName
from parsl_freetrain.core.allocation.solvers.column_generation import ColumnAllocator
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.equal_share import EqualShareAllocator
from parsl_freetrain.core.allocation.solvers.milp import MilpAllocator
from parsl_freetrain.core.allocation.solvers.mixed_classes import MixedAllocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.solver.isolated import IsolatedAllocator


class PartialAllocator(Allocator, Protocol):
    def applies(self, problem: Problem) -> bool: ...


class EitherAllocator:
    def __init__(self, first: PartialAllocator, otherwise: Allocator) -> None:
        self._first, self._otherwise = first, otherwise

    def allocate(self, problem: Problem) -> Answer:
        return (self._first if self._first.applies(problem) else self._otherwise).allocate(problem)

    def close(self) -> None:
        close_allocator(self._otherwise)


def allocator_named(name: str, time_limit_s: float = 10.0, isolated: bool = True) -> Allocator:
    """The solver of that name (or BadInput): 'auto' (the fastest exact one), 'milp', 'dp' or
    'equal-share'; pass it to :func:`close_allocator` when done. The MILP and column generation take
    the best found after ``time_limit_s``, in a child process if ``isolated``.
    """
    if name not in list(SolverName):
        raise BadInput(f'There is no solver {name!r}; choose one of {", ".join(SolverName)}.')
    if name == 'dp':
        return EitherAllocator(MixedAllocator(time_limit_s), DpAllocator())
    if name == 'equal-share':
        return EqualShareAllocator()
    milp: Allocator = MilpAllocator(time_limit_s)
    if name == 'auto':
        milp = EitherAllocator(ColumnAllocator(time_limit_s), milp)
    milp = EitherAllocator(MixedAllocator(time_limit_s), milp)
    if isolated:
        # Solvers check the clock only now and then.
        milp = IsolatedAllocator(milp, time_limit_s, margin_s=max(5.0, time_limit_s))
    return EitherAllocator(DpAllocator(), milp) if name == 'auto' else milp


def close_allocator(allocator: Allocator) -> None:
    close = getattr(allocator, 'close', None)
    if close is not None:
        close()
