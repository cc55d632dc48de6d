"""The exact allocation where a trainer may hold nodes of several classes at once: each way to hold
nodes has a binary variable. Of too many ways only some are looked at: 'feasible'.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.feasibility import pinned, stay_put
from parsl_freetrain.core.allocation.problem import Answer, Bid, Problem
from parsl_freetrain.core.allocation.solution import Asked, Found
from parsl_freetrain.core.allocation.solvers.highs import EXACT, Floats, solved

Way = tuple[int, ...]
Integers = NDArray[np.int64]


class MixedAllocator:
    """Exact for trainers with :attr:`Bid.mixed_parts`, up to ``most_ways`` ways of all trainers."""

    def __init__(self, time_limit_s: float = 10.0, most_ways: int = 30_000) -> None:
        self._time_limit_s, self._most_ways = time_limit_s, most_ways

    def applies(self, problem: Problem) -> bool:
        return any(bid.mixed_parts for bid in problem.bids)

    def allocate(self, problem: Problem) -> Answer:
        asked = Asked(problem, 'mixed')
        return asked.solved(lambda merged: self._solve(merged, asked))

    def _solve(self, problem: Problem, asked: Asked) -> Found:
        import highspy  # takes long to import, and most problems are solved without it

        ways, whole = self._ways(problem)
        each = [way for of_bid in ways for way in of_bid]
        bid = np.repeat(np.arange(len(ways)), [len(of_bid) for of_bid in ways])
        chosen_by = zip(bid, each, strict=True)
        worth = np.array([problem.value(problem.bids[j], w) for j, w in chosen_by])
        rows, least, most = _rules(problem, np.array(each, dtype=np.float64), bid)
        within_s = max(self._time_limit_s - asked.seconds, 0.0)
        solver, _ = solved(worth, rows.T, least, most, True, time_limit=within_s, **EXACT)
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Found('infeasible' if whole else 'feasible')
        chosen = np.array(solver.getSolution().col_value) > 0.5
        if np.bincount(bid[chosen], minlength=len(ways)).tolist() != [1] * len(ways):
            return Found('feasible')
        found = {
            problem.bids[j].name: way
            for j, way, taken in zip(bid.tolist(), each, chosen.tolist(), strict=True)
            if taken
        }
        certain = whole and status == highspy.HighsModelStatus.kOptimal
        return Found('optimal' if certain else 'feasible', found)

    def _ways(self, problem: Problem) -> tuple[list[list[Way]], bool]:
        """The ways of each bid, and whether they are all that it has."""
        keep, staying = pinned(problem), stay_put(problem)
        for counts, mixed in ((_every, True), (_some, True), (_some, False)):
            options = [
                [] if bid.name in keep else _options(problem, bid, counts, mixed)
                for bid in problem.bids
            ]
            if sum(math.prod(map(len, o)) for of in options for o in of) <= self._most_ways:
                break
        ways = []
        for bid, of_bid in zip(problem.bids, options, strict=True):
            possible = [way for option in of_bid for way in itertools.product(*option)]
            if bid.name not in keep and _may_stay(problem, bid):
                possible.append(problem.held(bid))
            found = [way for way in possible if bid.usable(sum(way)) == sum(way)]
            ways.append(list(dict.fromkeys([keep.get(bid.name, staying[bid.name]), *found])))
        return ways, counts is _every


def _may_stay(problem: Problem, bid: Bid) -> bool:
    """What a bid holds may be kept where it ends too soon for another."""
    held = problem.held(bid)
    one_block = problem.spans_blocks or sum(n > 0 for n in held) <= 1
    return one_block and (bid.mixed_parts > 0 or len(problem.classes_of(held)) <= 1)


def _every(most: int, held: int) -> Sequence[int]:
    return range(most + 1)


def _some(most: int, held: int) -> Sequence[int]:
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({0, most, *powers, *(n for n in range(held - 1, held + 2) if 0 <= n <= most)})


def _options(
    problem: Problem, bid: Bid, counts: Callable[[int, int], Sequence[int]], mixed: bool
) -> list[list[Sequence[int]]]:
    """The counts of each place that go together: of all places, or those of each class or block."""
    barred, held = problem.barred(bid), problem.held(bid)
    most = [counts(min(bid.max_nodes, p.nodes), held[b]) for b, p in enumerate(problem.places)]
    allowed = [(0,) if b in barred else ways for b, ways in enumerate(most)]
    if not problem.spans_blocks:
        together: Sequence[Way] = [(b,) for b in range(len(allowed))]
    elif bid.mixed_parts and mixed:
        return [allowed]
    else:
        together = list(problem.places_by_class.values())
    return [[at if b in of else (0,) for b, at in enumerate(allowed)] for of in together]


def _rules(problem: Problem, ways: Floats, bid: Integers) -> tuple[Floats, Floats, Floats]:
    """The rows of the programme over all ways, and the least and the most of each."""
    bids = len(problem.bids)
    of_bid = (bid == np.arange(bids)[:, None]).astype(np.float64)
    rows, least = [*ways.T, *of_bid], [-math.inf] * ways.shape[1]
    most = [float(place.nodes) for place in problem.places]
    least += [1.0] * bids
    most += [1.0] * bids
    for limit in problem.limits:
        member = np.isin(bid, problem.members(limit))
        rows.append(member * ways.sum(axis=1))
        least.append(limit.least)
        most.append(math.inf if limit.most is None else limit.most)
        if limit.node_s is not None:
            rows.append(member * (ways @ np.array(problem.seconds)))
            least.append(-math.inf)
            most.append(limit.node_s)
    return np.array(rows), np.array(least), np.array(most)
