"""The exact allocation in about a millisecond, where only node counts matter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.feasibility import pinned
from parsl_freetrain.core.allocation.problem import Answer, Bid, Limit, Problem
from parsl_freetrain.core.allocation.solution import Asked, groups_of, spread, worth_by_count
from parsl_freetrain.core.allocation.solvers.knapsack import Floats, best_counts
from parsl_freetrain.core.model.errors import BadInput

_REMEMBERED = 8192


@dataclass(frozen=True, eq=False)
class _Table:
    """The last bids' worth at each count, and nodes. Wider than needed, since pools grow."""

    bids: tuple[Bid, ...]
    horizon_s: float
    stay_s: float
    node_class: str
    most: int  # the largest of their max_nodes
    values: Floats
    current: NDArray[np.int64]
    fixed: NDArray[np.bool_]

    @property
    def width(self) -> int:
        return int(self.values.shape[1])


class DpAllocator:
    """A price per node and a knapsack. Worths are cached by bid object: pass the same ones."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, float, float, bool, str], tuple[Bid, Floats]] = {}
        none = np.zeros(0, dtype=np.int64)
        self._table = _Table((), 0.0, 0.0, '', 0, np.zeros((0, 0)), none, none.astype(np.bool_))

    def applies(self, problem: Problem) -> bool:
        """Whether all nodes leave together, and each limit is on one trainer or a cap on all."""
        simple = all(_is_simple(problem, limit) for limit in problem.limits)
        mixed = any(bid.mixed_parts for bid in problem.bids)
        return simple and not mixed and len(groups_of(problem)) == 1

    def allocate(self, problem: Problem) -> Answer:
        asked = Asked(problem, 'dp')
        groups = groups_of(problem)
        if len(groups) != 1 or not all(_is_simple(problem, limit) for limit in problem.limits):
            raise BadInput(
                'Blocks with several ends or classes, blocks that cannot be mixed and limits on '
                'some trainers together are not for the dynamic programme; use auto or milp.'
            )
        values = self._values(problem)
        every = np.arange(len(problem.bids))
        staying = self._table.current
        if not self._all_can_stay(problem, values):
            sums = (sum(asked.staying[bid.name]) for bid in problem.bids)
            staying = np.fromiter(sums, np.int64, len(problem.bids))
        before = float(values[every, staying].sum())
        kept = pinned(problem) if self._table.fixed.any() else {}
        counts = best_counts(*_limited(problem, values, kept))
        if counts is None:
            return asked.stay('infeasible')
        named = zip(problem.bids, counts.tolist(), strict=True)
        found = {bid.name: (count,) for bid, count in named}
        worth = float(values[every, counts].sum())
        return asked.best_of('optimal', spread(problem, groups, found), worth, before)

    def _values(self, problem: Problem) -> Floats:
        """Worth of each count from 0, shape (bids, counts); minus infinity where not allowed."""
        nodes, stay_s = sum(block.nodes for block in problem.places), problem.places[0].remaining_s
        node_class = problem.places[0].node_class
        old, bids = self._table, problem.bids
        before = len(old.bids), old.horizon_s, old.stay_s, old.node_class
        if before == (len(bids), problem.horizon_s, stay_s, node_class):
            # From one decision to the next, few bids change.
            pairs = enumerate(zip(old.bids, bids, strict=True))
            changed = [j for j, (last, bid) in pairs if bid is not last]
            largest = max((bids[j].max_nodes for j in changed), default=0)
            if nodes < old.width or largest < old.width > old.most:
                for j in changed:
                    row = self._row(bids[j], old.width - 1, problem.horizon_s, stay_s, node_class)
                    old.values[j] = -np.inf
                    old.values[j, : len(row)] = row
                    old.current[j], old.fixed[j] = bids[j].current_nodes, bids[j].fixed
                most = max(old.most, max((bids[j].max_nodes for j in changed), default=0))
                self._table = replace(old, bids=bids, most=most)
                return old.values[:, : nodes + 1]
        most = max((bid.max_nodes for bid in bids), default=0)
        values = np.full((len(bids), min(most, 2 * nodes) + 1), -np.inf)
        for line, bid in zip(values, bids, strict=True):
            row = self._row(bid, len(line) - 1, problem.horizon_s, stay_s, node_class)
            line[: len(row)] = row
        current = np.fromiter((bid.current_nodes for bid in bids), np.int64, len(bids))
        fixed = np.fromiter((bid.fixed for bid in bids), np.bool_, len(bids))
        stays = problem.horizon_s, stay_s, node_class
        self._table = _Table(bids, *stays, most, values, current, fixed)
        return values[:, : nodes + 1]

    def _all_can_stay(self, problem: Problem, values: Floats) -> bool:
        current = self._table.current
        return bool(
            current.sum() <= sum(block.nodes for block in problem.places)
            and current.max(initial=0) < values.shape[1]
            and np.isfinite(values[np.arange(len(current)), current]).all()
            and not self._table.fixed.any()
        )

    def _row(
        self, bid: Bid, nodes: int, horizon_s: float, stay_s: float, node_class: str
    ) -> Floats:
        size = min(bid.max_nodes, nodes) + 1
        key = id(bid), horizon_s, min(stay_s, horizon_s), stay_s < bid.shortest_s, node_class
        known = self._rows.get(key)
        if known is None or known[0] is not bid or len(known[1]) < size:
            if len(self._rows) >= _REMEMBERED:
                self._rows.clear()
            row = worth_by_count(bid, size - 1, horizon_s, stay_s, node_class)
            known = self._rows[key] = (bid, row)
        return known[1][:size]


def _limited(
    problem: Problem, values: Floats, kept: Mapping[str, tuple[int, ...]]
) -> tuple[Floats, int]:
    """The values, minus infinity at counts that limits rule out; and how many nodes may be used."""
    nodes = sum(block.nodes for block in problem.places)
    if not kept and not problem.limits:
        return values, nodes
    values = values.copy()
    index = {bid.name: j for j, bid in enumerate(problem.bids)}
    for name, held in kept.items():
        value = values[index[name], sum(held)]
        values[index[name]] = -np.inf
        values[index[name], sum(held)] = value
    for limit in problem.limits:
        members = problem.members(limit)
        most = _most(problem, limit)
        if len(members) == 1:
            row = values[members[0]]
            row[: max(limit.least, 0)] = -np.inf
            row[min(max(most + 1, 0), len(row)) :] = -np.inf
        elif members:
            nodes = min(nodes, most)
        elif limit.least > 0:
            nodes = -1
    return values, nodes


def _is_simple(problem: Problem, limit: Limit) -> bool:
    members = problem.members(limit)
    return len(members) <= 1 or (len(members) == len(problem.bids) and limit.least <= 0)


def _most(problem: Problem, limit: Limit) -> int:
    nodes = sum(block.nodes for block in problem.places)
    most = nodes if limit.most is None else limit.most
    seconds = problem.seconds[0]
    if limit.node_s is not None and seconds > 0:
        most = min(most, math.floor((limit.node_s + 1e-9 * max(1.0, abs(limit.node_s))) / seconds))
    return most
