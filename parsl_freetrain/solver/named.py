"""Which solver answers: by name, and by what the problem needs."""

from __future__ import annotations

from typing import Protocol

from parsl_freetrain.core.allocation import Allocator, Answer, Problem
from parsl_freetrain.core.columns import ColumnAllocator
from parsl_freetrain.core.dp import DpAllocator
from parsl_freetrain.core.equal_share import EqualShareAllocator
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.milp import MilpAllocator
from parsl_freetrain.solver.isolated import IsolatedAllocator

SOLVERS = ('auto', 'milp', 'dp', 'equal-share')


class Particular(Protocol):
    """An allocator for some problems."""

    def applies(self, problem: Problem) -> bool:
        """Whether it can solve this one."""
        ...

    def allocate(self, problem: Problem) -> Answer:
        """The best allocation found."""
        ...


class EitherAllocator:
    """One allocator where it applies, else another one.

    Parameters
    ----------
    first
        Is asked if it applies.
    otherwise
        For all other problems.
    """

    def __init__(self, first: Particular, otherwise: Allocator) -> None:
        self._first = first
        self._otherwise = otherwise

    def allocate(self, problem: Problem) -> Answer:
        """What the one of them that is asked finds."""
        return (self._first if self._first.applies(problem) else self._otherwise).allocate(problem)

    def close(self) -> None:
        """Close the other allocator."""
        close_allocator(self._otherwise)


def allocator_named(name: str, time_limit_s: float = 10.0, isolated: bool = True) -> Allocator:
    """The solver of that name; give it to :func:`close_allocator` in the end.

    Parameters
    ----------
    name
        'auto' (whatever is fastest and exact: the dynamic programme, column generation or the MILP), 'milp', 'dp' or 'equal-share'.
    time_limit_s
        The MILP, and column generation, take the best allocation found after so many seconds.
    isolated
        Whether these two run in a process of their own, started when it is first needed.

    Raises
    ------
    BadInput
        If there is no such solver, or the limit is no number of seconds.
    """
    if name not in SOLVERS:
        raise BadInput(f'There is no solver {name!r}; choose one of {", ".join(SOLVERS)}.')
    if name == 'dp':
        return DpAllocator()
    if name == 'equal-share':
        return EqualShareAllocator()
    milp: Allocator = MilpAllocator(time_limit_s)
    if name == 'auto':
        milp = EitherAllocator(ColumnAllocator(time_limit_s), milp)
    if isolated:
        milp = IsolatedAllocator(milp, time_limit_s, margin_s=max(5.0, time_limit_s))   # solvers look at the clock now and then
    return EitherAllocator(DpAllocator(), milp) if name == 'auto' else milp


def close_allocator(allocator: Allocator) -> None:
    """End the process that an allocator may have; one without ``close()`` has none."""
    close = getattr(allocator, 'close', None)
    if close is not None:
        close()
