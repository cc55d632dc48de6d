"""The allocation as a readable mixed-integer linear programme (PuLP, solved by HiGHS).

One binary per (trainer, node count): nodes of a pool are interchangeable and nothing migrates, so
counts are all that matters; and a choice among counts stays exact where a measured curve is not concave.
"""

from __future__ import annotations

import logging
from time import perf_counter

import pulp

from parsl_freetrain.core.allocation import Answer, Bid, Problem

logger = logging.getLogger(__name__)


class MilpAllocator:
    """Exact allocation by counting.

    Parameters
    ----------
    time_limit_s
        Seconds after which the best allocation found so far is taken, if it beats staying put.
    """

    def __init__(self, time_limit_s: float = 10.0) -> None:
        self.time_limit_s = time_limit_s

    def allocate(self, problem: Problem) -> Answer:
        """Maximise the sum of the bids' values; each gets 0 or min..max nodes, all no more than there are."""
        start = perf_counter()
        staying = stay_put(problem)
        staying_objective = problem.objective(staying)
        try:
            status, found = self._solve(problem)
        except Exception:  # whatever a solver raises, training goes on as it is
            logger.warning('The solver failed, what runs is kept.', exc_info=True)
            status, found = 'feasible', staying
        objective = problem.objective(found)
        # Solvers work with tolerances: an answer that gains nothing beyond them is no reason to move anything.
        if objective <= staying_objective + 1e-9 * max(1.0, abs(staying_objective)):
            found, objective = staying, staying_objective
        return Answer(status, objective, 'milp', perf_counter() - start, found)

    def _solve(self, problem: Problem) -> tuple[str, dict[str, int]]:
        model = pulp.LpProblem('allocation', pulp.LpMaximize)
        chosen: dict[tuple[int, int], pulp.LpVariable] = {}
        for j, bid in enumerate(problem.bids):
            counts = choices(bid, problem.nodes)
            for k in counts:
                chosen[j, k] = model.add_variable(f'trainer_{j}_gets_{k}', cat=pulp.LpBinary)
            model += pulp.lpSum(chosen[j, k] for k in counts) == 1
        model += pulp.lpSum(bid.value(k, problem.horizon_s) * chosen[j, k]
                            for j, bid in enumerate(problem.bids) for k in choices(bid, problem.nodes))
        model += pulp.lpSum(k * variable for (_, k), variable in chosen.items()) <= problem.nodes
        model.solve(pulp.HiGHS(msg=False, timeLimit=self.time_limit_s, gapRel=0.0, gapAbs=0.0, threads=1))
        picked = {problem.bids[j].name: k for (j, k), variable in chosen.items() if (variable.value() or 0.0) > 0.5}
        if len(picked) != len(problem.bids):
            return 'feasible', stay_put(problem)
        return ('optimal' if model.sol_status == pulp.LpSolutionOptimal else 'feasible'), picked


def choices(bid: Bid, nodes: int) -> list[int]:
    """The node counts that a bid may get out of ``nodes``."""
    return [0, *range(max(bid.min_nodes, 1), min(bid.max_nodes, nodes) + 1)]


def stay_put(problem: Problem) -> dict[str, int]:
    """What runs now, as far as the nodes suffice: in the bids' order, each keeps its nodes or the most that is left."""
    left = problem.nodes
    kept = {}
    for bid in problem.bids:
        count = min(bid.current_nodes, bid.max_nodes, left)
        kept[bid.name] = count if count >= bid.min_nodes else 0
        left -= kept[bid.name]
    return kept
