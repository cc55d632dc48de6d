"""The allocation as a MILP (PuLP and HiGHS), exact for any curve: the reference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from parsl_freetrain.core.allocation.feasibility import pinned
from parsl_freetrain.core.allocation.problem import Answer, Bid, Limit, Problem
from parsl_freetrain.core.allocation.solution import Asked, Found
from parsl_freetrain.core.allocation.solvers.highs import EXACT, scale_of
from parsl_freetrain.core.model.errors import BadInput

if TYPE_CHECKING:
    import pulp


class MilpAllocator:
    """Exact by a MILP over node counts; after ``time_limit_s`` (or BadInput) the best found."""

    def __init__(self, time_limit_s: float = 10.0) -> None:
        if not math.isfinite(time_limit_s) or time_limit_s < 0:
            raise BadInput(
                f'The time limit of the MILP is {time_limit_s}; it must be 0 or more, in seconds.'
            )
        self.time_limit_s = time_limit_s

    def allocate(self, problem: Problem) -> Answer:
        asked = Asked(problem, 'milp')
        return asked.solved(lambda merged: self._solve(merged, asked))

    def _solve(self, problem: Problem, asked: Asked) -> Found:
        import pulp  # slow to import, and most problems are solved without it

        model = IntegerProgram(problem)
        left_s = max(self.time_limit_s - asked.seconds, 0.0)
        model.lp.solve(pulp.HiGHS(msg=False, timeLimit=left_s, threads=1, **EXACT))
        if model.lp.sol_status == pulp.LpSolutionInfeasible:
            return Found('infeasible')
        if model.lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return Found('feasible')
        if model.lp.sol_status == pulp.LpSolutionOptimal:
            return Found('optimal', model.allocation())
        return Found('feasible', model.allocation(), model.bound())


class IntegerProgram:
    def __init__(self, problem: Problem) -> None:
        import pulp

        self._pulp = pulp
        self._problem = problem
        self._keep = pinned(problem)
        self.lp: Any = pulp.LpProblem('allocation', pulp.LpMaximize)
        self._zero = self._integer('zero', 0)  # solvers want a variable in every constraint
        self._worth: list[tuple[float, pulp.LpVariable]] = [(0.0, self._zero)]
        self._nodes: dict[str, list[pulp.LpAffineExpression]] = {}
        alone = all(len(places) == 1 for places in problem.places_by_class.values())
        one_block = alone or not problem.spans_blocks
        for j, bid in enumerate(problem.bids):
            count = self._in_one_block if one_block else self._in_several
            self._nodes[bid.name] = count(j, bid)
        self._scale = scale = scale_of(max(abs(worth) for worth, _ in self._worth))
        worths = ((scale * worth, variable) for worth, variable in self._worth)
        self.lp.setObjective(self._weighted(worths))
        for b, block in enumerate(problem.places):
            self.lp += self._sum(nodes[b] for nodes in self._nodes.values()) <= block.nodes
        for limit in problem.limits:
            self._limit(limit)

    def allocation(self) -> dict[str, tuple[int, ...]]:
        every = self._nodes.items()
        return {name: tuple(round(one.value() or 0.0) for one in nodes) for name, nodes in every}

    def bound(self) -> float | None:
        # PuLP has HiGHS minimise the negative of the objective.
        bound = -float(self.lp.solverModel.getInfo().mip_dual_bound) / self._scale
        return bound if math.isfinite(bound) else None

    def _in_one_block(self, j: int, bid: Bid) -> list[pulp.LpAffineExpression]:
        """A binary for each block and count: it has this number there and none elsewhere."""
        places = self._problem.places
        nothing = (0,) * len(places)
        short, held = self._problem.barred(bid), self._problem.held(bid)
        options = [
            nothing,
            *(
                (*nothing[:b], k, *nothing[b + 1 :])
                for b, block in enumerate(places)
                if b not in short
                for k in bid.counts(block.nodes)
            ),
        ]
        if any(held[b] for b in short) and self._problem.can_go_on(bid):
            options.append(held)
        if bid.name in self._keep:
            options = [self._keep[bid.name]]
        chosen = [self._binary(f'trainer_{j}_option_{i}') for i in range(len(options))]
        self.lp += self._sum(chosen) == 1
        ways = list(zip(options, chosen, strict=True))
        self._worth += [(self._problem.value(bid, nodes), one) for nodes, one in ways]
        of_place = [[(nodes[b], one) for nodes, one in ways] for b in range(len(places))]
        return [self._weighted(each) for each in of_place]

    def _in_several(self, j: int, bid: Bid) -> list[pulp.LpAffineExpression]:
        """Integers for the nodes in each block, of one class only; see :meth:`_in_class`."""
        problem, places = self._problem, self._problem.places
        cap = [min(block.nodes, bid.max_nodes) for block in places]
        short, held = problem.barred(bid), problem.held(bid)
        fits = all(n <= most for n, most in zip(held, cap, strict=True))
        goes_on = fits and any(held[b] for b in short) and problem.can_go_on(bid)
        for b in short:
            cap[b] = held[b] if goes_on else 0
        nodes = [self._integer(f'trainer_{j}_block_{b}', most) for b, most in enumerate(cap)]
        classes = enumerate(problem.places_by_class)
        none = [self._in_class(f'{j}_class_{c}', bid, name, nodes, cap) for c, name in classes]
        if len(none) > 1:
            self.lp += self._sum(none) >= len(none) - 1
        if goes_on:
            # Nodes that it could not start on can only be kept together with all others it holds.
            same = self._binary(f'trainer_{j}_goes_on')
            for b, most in enumerate(cap):
                self.lp += nodes[b] >= held[b] * same
                self.lp += nodes[b] <= (0 if b in short else most) * (1 - same) + held[b] * same
        for b, kept in enumerate(self._keep.get(bid.name, ())):
            self.lp += nodes[b] == kept
        return [self._pulp.LpAffineExpression(variable) for variable in nodes]

    def _in_class(
        self, j: str, bid: Bid, node_class: str, nodes: list[pulp.LpVariable], cap: list[int]
    ) -> pulp.LpVariable:
        """By interval between ends, binaries for the nodes left of a class; returns that of 0."""
        problem, places = self._problem, self._problem.places
        left = list(problem.places_by_class[node_class])
        remaining = {places[b].remaining_s for b in left}
        ends = sorted(end for end in remaining if end < problem.horizon_s)
        curve, since = bid.curve_on(node_class), 0.0
        for i, end in enumerate([*ends, math.inf]):
            there = min(sum(cap[b] for b in left), bid.max_nodes)
            counts = [0, *bid.counts(there)] if i == 0 else range(there + 1)
            within = end < problem.horizon_s
            going = [b for b in left if within and places[b].remaining_s == end]
            stays = {k: self._binary(f'trainer_{j}_interval_{i}_has_{k}') for k in counts}
            title = f'trainer_{j}_interval_{i}_loses_some_of_'
            loses = {k: self._binary(f'{title}{k}') for k in counts if k and going}
            self.lp += self._sum([*stays.values(), *loses.values()]) == 1
            self.lp += self._weighted(
                (k, v) for some in (stays, loses) for k, v in some.items()
            ) == self._sum(nodes[b] for b in left)
            if going:
                lost = self._weighted((k, v) for k, v in loses.items())
                self.lp += self._sum(nodes[b] for b in going) <= lost
            seconds = min(end, problem.horizon_s) - since
            rate = {k: curve.rate_at(bid.usable(k)) for k in counts}
            self._worth += [(seconds * rate[k], v) for k, v in stays.items()]
            self._worth += [((seconds - bid.rescale_down_s) * rate[k], v) for k, v in loses.items()]
            if i == 0:
                none = stays[0]
                chosen = {k: [some[k] for some in (stays, loses) if k in some] for k in counts}
                if node_class == bid.current_class:
                    self._change(j, bid, nodes, chosen)
                else:  # a move; having none of its old class is charged as a change to fewer
                    cost = (bid.rescale_up_s - bid.rescale_down_s) * bid.current_rate
                    moved = [v for k, variables in chosen.items() if k for v in variables]
                    self._worth += [(-cost, variable) for variable in moved]
            left = [b for b in left if b not in going]
            since = end
        return none

    def _change(
        self,
        j: str,
        bid: Bid,
        nodes: list[pulp.LpVariable],
        chosen: dict[int, list[pulp.LpVariable]],
    ) -> None:
        """The cost of changing nodes, by the new count; as many others cost as growing."""
        now, rate = bid.current_nodes, bid.current_rate
        for k, variables in chosen.items():
            if k != now:
                cost = (bid.rescale_up_s if k > now else bid.rescale_down_s) * rate
                self._worth += [(-cost, variable) for variable in variables]
        if now in chosen and now and bid.rescale_up_s * rate > 0:
            others = self._binary(f'trainer_{j}_changes_nodes')
            for b, held in enumerate(self._problem.held(bid)):
                if held:
                    same = self._weighted((held, variable) for variable in chosen[now])
                    self.lp += nodes[b] >= same - held * others
            self._worth.append((-bid.rescale_up_s * rate, others))

    def _limit(self, limit: Limit) -> None:
        members = [nodes for name, nodes in self._nodes.items() if limit.concerns(name)]
        total = self._sum(expression for nodes in members for expression in nodes)
        self.lp += total >= limit.least
        if limit.most is not None:
            self.lp += total <= limit.most
        if limit.node_s is not None:
            seconds = self._problem.seconds
            used = [(s, one) for nodes in members for s, one in zip(seconds, nodes, strict=True)]
            self.lp += self._sum(s * expression for s, expression in used) <= limit.node_s

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.lp.add_variable(name, cat=self._pulp.LpBinary)

    def _integer(self, name: str, most: int) -> pulp.LpVariable:
        return self.lp.add_variable(name, 0, most, cat=self._pulp.LpInteger)

    def _weighted(self, terms: Iterable[tuple[float, pulp.LpVariable]]) -> pulp.LpAffineExpression:
        weights: dict[pulp.LpVariable, float] = {}
        for weight, variable in terms:
            weights[variable] = weights.get(variable, 0.0) + weight
        return self._pulp.LpAffineExpression(weights)

    def _sum(self, terms: Iterable[Any]) -> pulp.LpAffineExpression:
        return self._pulp.lpSum(terms) + self._zero
