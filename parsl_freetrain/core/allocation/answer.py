"""The answer to an allocation problem, and the interface of its solvers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from parsl_freetrain.core.allocation.problem import Problem


def relative_gap(objective: float, bound: float | None) -> float | None:
    """``(bound - objective) / bound``, 0 where the objective reaches it; None without a bound."""
    if bound is None:
        return None
    size = max(abs(bound), abs(objective))
    return max(bound - objective, 0.0) / size if size > 0 else 0.0


@dataclass(frozen=True)
class Answer:
    """An allocation."""

    #: 'optimal' (to within 1e-9 of the objective, where MILP solvers stop), 'feasible' (time ran
    #: out; never worse than staying) or 'infeasible' (no allocation that keeps all limits exists,
    #: or none was found in time: what runs is kept).
    status: str
    objective: float  #: its value, by :meth:`Problem.objective`
    solver: str  #: name of the solver
    seconds: float  #: how long that took
    #: Nodes by trainer; every bid's name is a key.
    allocation: dict[str, int] = field(default_factory=dict)
    #: Nodes by trainer and block, zeros left out; every bid's name is a key. Empty where the
    #: problem names no blocks.
    by_block: dict[str, dict[str, int]] = field(default_factory=dict)
    staying: float = 0.0  #: the objective of keeping what runs, as far as it can be kept
    #: No allocation is worth more than this; the objective itself where the answer is optimal.
    #: None: there is no allocation that keeps all limits, or none is known.
    bound: float | None = None

    @property
    def gap(self) -> float | None:
        """``(bound - objective) / bound``: by how much the optimum could be better at most."""
        return relative_gap(self.objective, self.bound)


class Allocator(Protocol):
    """Anything that solves a :class:`Problem`."""

    def allocate(self, problem: Problem) -> Answer: ...
