"""The allocation problem, its answer, and the seam behind which solvers stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from parsl_freetrain.core.words import ScalingCurve


@dataclass(frozen=True)
class Bid:
    """One trainer as the allocator sees it.

    Attributes
    ----------
    name
        The trainer.
    min_nodes, max_nodes
        It gets 0 nodes or a count in this range.
    current_nodes
        What it holds now; leaving this count costs ``rescale_up_s`` or ``rescale_down_s`` seconds of the current rate.
    curve
        What a node count is worth per second.
    """

    name: str
    min_nodes: int
    max_nodes: int
    current_nodes: int
    rescale_up_s: float
    rescale_down_s: float
    curve: ScalingCurve

    def value(self, nodes: int, horizon_s: float) -> float:
        """Worth of ``nodes`` over the horizon: horizon x rate(nodes) - rescale cost x rate(current).

        The cost is charged at the current rate, as published (BFTrainer, arXiv 2106.12091); a current
        count below ``min_nodes`` has rate 0.
        """
        current_rate = self.curve.rate_at(self.current_nodes) if self.current_nodes >= self.min_nodes else 0.0
        cost_s = 0.0
        if nodes > self.current_nodes:
            cost_s = self.rescale_up_s
        elif nodes < self.current_nodes:
            cost_s = self.rescale_down_s
        return horizon_s * self.curve.rate_at(nodes) - cost_s * current_rate


@dataclass(frozen=True)
class Problem:
    """Which trainer gets how many of ``nodes`` nodes for the next ``horizon_s`` seconds?"""

    horizon_s: float
    nodes: int
    bids: tuple[Bid, ...]

    def objective(self, allocation: Mapping[str, int]) -> float:
        """Value of an allocation (nodes by trainer, absent means 0), in the curves' unit x seconds."""
        return sum((bid.value(allocation.get(bid.name, 0), self.horizon_s) for bid in self.bids), 0.0)


@dataclass(frozen=True)
class Answer:
    """An allocation. ``status``: 'optimal', 'feasible' (time ran out; never worse than staying) or 'infeasible'."""

    status: str
    objective: float
    solver: str
    seconds: float
    allocation: dict[str, int] = field(default_factory=dict)


class Allocator(Protocol):
    """Anything that solves a :class:`Problem`."""

    def allocate(self, problem: Problem) -> Answer:
        """The best allocation found; every bid's name is a key."""
        ...
