"""Explains an allocation: the gain and rescale cost of each trainer, and its next best choice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parsl_freetrain.core.allocation.feasibility import by_place, pinned
from parsl_freetrain.core.allocation.problem import Allocator, Answer, Bid, Limit, Problem

NOISE = 1e-9  # objectives that differ by so small a part are the same


@dataclass(frozen=True)
class Alternative:
    """The best allocation of all in which one trainer gets another node count than it got."""

    nodes: int  # what the trainer gets in it
    objective: float
    worse_by: float  # than the chosen one; below 0, as it can be if that is not optimal: better


@dataclass(frozen=True)
class Reason:
    """One trainer's part of an allocation. Worths: over the horizon, objective's unit x seconds."""

    trainer: str
    nodes_before: int
    nodes: int
    worth_before: float  # of keeping its nodes
    worth: float  # the cost of the rescale taken off
    gain: float
    rescale_cost: float  # now, and when blocks end within the horizon
    alternative: Alternative | None  # None: no allocation gives it another count


@dataclass(frozen=True)
class LimitUse:
    """How far a side constraint is used within the horizon; None: no bound."""

    why: str
    nodes: int
    least: int
    most: int | None
    node_s: float
    most_node_s: float | None


@dataclass(frozen=True)
class Explanation:
    reasons: tuple[Reason, ...]
    limits: tuple[LimitUse, ...]


def explain(
    problem: Problem, answer: Answer, allocator: Allocator, only: str | None = None
) -> Explanation:
    """Explain to ``only`` one trainer or all; alternatives are as exact as the ``allocator``."""
    chosen = by_place(problem, answer)
    keep = pinned(problem)
    known: dict[tuple[Bid, tuple[int, ...], bool], Alternative | None] = {}
    reasons = []
    for bid in problem.bids if only is None else [bid for bid in problem.bids if bid.name == only]:
        nodes = chosen[bid.name]
        fixed = bid.name in keep or answer.status == 'infeasible'
        # Limits are about names; without them only what is bid counts.
        alike = (bid if problem.limits else replace(bid, name=''), nodes, fixed)
        if alike not in known:
            known[alike] = (
                None
                if fixed
                else _alternative(problem, bid, sum(nodes), answer.objective, allocator)
            )
        reasons.append(_reason(problem, bid, nodes, known[alike]))
    uses = tuple(_use(problem, limit, chosen) for limit in problem.limits)
    return Explanation(tuple(reasons), uses)


def _reason(
    problem: Problem, bid: Bid, nodes: Sequence[int], alternative: Alternative | None
) -> Reason:
    before, worth = problem.value(bid, problem.held(bid)), problem.value(bid, nodes)
    free = problem.value(replace(bid, rescale_up_s=0.0, rescale_down_s=0.0), nodes)
    held, gain = bid.current_nodes, worth - before
    return Reason(bid.name, held, sum(nodes), before, worth, gain, free - worth, alternative)


def _alternative(
    problem: Problem, bid: Bid, count: int, objective: float, allocator: Allocator
) -> Alternative | None:
    """The better of the best allocations that give the bid fewer nodes, and more."""
    bounds = [Limit((bid.name,), least=count + 1)] if count < bid.usable(problem.nodes) else []
    if count:
        bounds.append(Limit((bid.name,), most=count - 1))
    best: Alternative | None = None
    for bound in bounds:
        answer = allocator.allocate(replace(problem, limits=(*problem.limits, bound)))
        nodes = answer.allocation[bid.name]
        better = best is None or answer.objective > best.objective
        if answer.status != 'infeasible' and nodes != count and better:
            worse_by = objective - answer.objective
            noise = NOISE * max(1.0, abs(objective))
            best = Alternative(nodes, answer.objective, worse_by if abs(worse_by) > noise else 0.0)
    return best


def _use(problem: Problem, limit: Limit, chosen: Mapping[str, Sequence[int]]) -> LimitUse:
    members = [chosen[name] for name in limit.members or chosen]
    node_s = sum(n * s for counts in members for n, s in zip(counts, problem.seconds, strict=True))
    held = sum(map(sum, members))
    return LimitUse(limit.why, held, limit.least, limit.most, node_s, limit.node_s)
