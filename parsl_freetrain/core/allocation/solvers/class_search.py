"""The exact allocation among node classes, where the nodes of each class end together.

A trainer gets nodes of one class, so a choice is a class and a count. A linear programme puts a
price on the nodes of each class, and with the prices an upper bound on the optimum. The search goes
through the trainers one by one, and keeps the best value for each number of nodes given away. It
leaves out whatever cannot reach a target below the bound, by any of several prices. If something
reaches the target, it is the optimum; if not, the target is lowered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.allocation.answer import Allocator, Answer
from parsl_freetrain.core.allocation.block_groups import grouped, groups_of, spread
from parsl_freetrain.core.allocation.bounds import worth_by_count
from parsl_freetrain.core.allocation.incumbent import pinned
from parsl_freetrain.core.allocation.problem import Limit, Problem
from parsl_freetrain.core.allocation.solution import Asked
from parsl_freetrain.core.allocation.solvers.highs import Floats, solved

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# The first target is below the bound by this share of it; later ones by ever more.
_FIRST, _STEP, _LAST = 2.5e-4, 1.4, 0.05
# Besides the prices of the linear programme: each class alone cheaper or dearer.
_FACTORS = (0.85, 0.95, 1.05, 1.15)


class ClassAllocator:
    """Exact allocation of nodes of several classes.

    Parameters
    ----------
    otherwise
        Solves the problems in which too many choices come close to the bound.
    most_states
        Maximum number of partial allocations that are kept at a time.
    """

    def __init__(self, otherwise: Allocator, most_states: int = 2000) -> None:
        self._otherwise = otherwise
        self._most_states = most_states

    def applies(self, problem: Problem) -> bool:
        """Whether this solver can try the problem: several classes, each with one end, and limits
        only on one trainer or as a maximum of nodes for all.
        """
        classes = len(problem.places_by_class)
        return (
            1 < classes == len(groups_of(problem))
            and problem.spans_blocks
            and math.prod(place.nodes + 1 for place in problem.places) < 2**62
            and all(_is_simple(problem, limit) for limit in problem.limits)
        )

    def allocate(self, problem: Problem) -> Answer:
        """The optimum."""
        asked = Asked(problem, 'classes')
        groups = groups_of(problem)
        choices = _Choices(grouped(problem, groups))
        found = choices.best(self._most_states)
        if found is None:
            return self._otherwise.allocate(problem)
        allocation, worth = found
        nodes = {
            bid.name: tuple(counts)
            for bid, counts in zip(problem.bids, allocation.tolist(), strict=True)
        }
        return asked.best_of('optimal', spread(problem, groups, nodes), worth)


class _Choices:
    """What each bid may get.

    Attributes
    ----------
    worth
        Shape (bids, classes, counts); minus infinity where it is not allowed. Having nothing is a
        choice of the first class.
    """

    def __init__(self, problem: Problem) -> None:
        places = problem.places
        most = max((min(bid.max_nodes, problem.nodes) for bid in problem.bids), default=0)
        self.worth = np.full((len(problem.bids), len(places), most + 1), -np.inf)
        for j, bid in enumerate(problem.bids):
            for c, place in enumerate(places):
                count = min(bid.max_nodes, place.nodes)
                self.worth[j, c, : count + 1] = worth_by_count(
                    bid, count, problem.horizon_s, place.remaining_s, place.node_class
                )
        self.worth[:, 1:, 0] = -np.inf
        self._counts = np.arange(most + 1)
        # What one node of each class uses of the classes, and of the maximum for all.
        weight, room = [np.eye(len(places))], [place.nodes for place in places]
        index = {bid.name: j for j, bid in enumerate(problem.bids)}
        for name, held in pinned(problem).items():
            self._keep(index[name], held)
        for limit in problem.limits:
            members = problem.members(limit)
            most = problem.nodes if limit.most is None else limit.most
            if len(members) > 1:
                weight.append(np.ones((1, len(places))))
                room.append(most)
            elif members:
                worth = self.worth[members[0]]
                worth[:, : max(limit.least, 0)] = -np.inf
                worth[:, max(most + 1, 0) :] = -np.inf
        self._weight, self._room = np.concatenate(weight), np.array(room, dtype=np.float64)

    def best(self, most_states: int) -> tuple[Integers, float] | None:
        """The best allocation, shape (bids, classes), and its worth; None if there is none or it is
        not found.
        """
        bids, classes, _ = self.worth.shape
        if not np.isfinite(self.worth).any(axis=(1, 2)).all() or (self._room < 0).any():
            return None
        if not bids:
            return np.zeros((0, classes), dtype=np.int64), 0.0
        prices = self._prices()
        variants = [prices]
        for r in range(len(prices)):
            variants += [prices * np.where(np.arange(len(prices)) == r, f, 1) for f in _FACTORS]
        search = _Search(self.worth, self._counts, self._weight, self._room, np.array(variants))
        size = max(abs(search.bound), float(np.abs(search.best).max()), 1e-300)
        short = _FIRST
        while short < _LAST:
            try:
                found = search.above(search.bound - short * size, most_states)
            except _TooMany:
                return None
            if found is not None:
                return found
            short *= _STEP
        return None

    def _keep(self, j: int, held: tuple[int, ...]) -> None:
        """Leave a bid only the choice of what it holds."""
        c = max(range(len(held)), key=lambda c: held[c])
        value = self.worth[j, c, held[c]] if held[c] else self.worth[j, 0, 0]
        self.worth[j] = -np.inf
        self.worth[j, c if held[c] else 0, held[c]] = value

    def _prices(self) -> Floats:
        """Prices of the linear programme over the corners of the bids' values."""
        finite = np.isfinite(self.worth)
        value = np.where(finite, self.worth, 0.0)
        corner = finite.copy()
        inner = finite[..., 2:] & finite[..., 1:-1] & finite[..., :-2]
        bend = value[..., 2:] - 2 * value[..., 1:-1] + value[..., :-2]
        corner[..., 1:-1] &= ~inner | (bend < -1e-9 * np.abs(value).max())
        bid, node_class, count = np.nonzero(corner)
        rows = np.zeros((len(bid), len(self._room) + len(self.worth)))
        rows[:, : len(self._room)] = self._weight[:, node_class].T * count[:, None]
        rows[np.arange(len(bid)), len(self._room) + bid] = 1.0
        solver, scale = solved(
            value[corner],
            rows,
            np.append(np.full(len(self._room), -np.inf), np.ones(len(self.worth))),
            np.append(self._room, np.ones(len(self.worth))),
            presolve='off',
        )
        dual = np.array(solver.getSolution().row_dual[: len(self._room)])
        prices: Floats = np.maximum(-dual, 0.0) / scale
        return prices


def _is_simple(problem: Problem, limit: Limit) -> bool:
    members = problem.members(limit)
    cap = limit.node_s is None and len(members) > 0
    return cap and (len(members) == 1 or (len(members) == len(problem.bids) and limit.least <= 0))


class _TooMany(Exception):
    """More partial allocations than allowed reach the target."""


@dataclass(frozen=True)
class _Stage:
    """One bid in the search: of each partial allocation, the one it continues, and its choice."""

    bid: int
    parent: Integers
    node_class: Integers
    count: Integers


class _Search:
    """The search at given prices, shape (variants, caps).

    Attributes
    ----------
    bound
        No allocation is worth more.
    best
        Shape (variants, bids): the most that a choice of each bid is worth after paying.
    """

    def __init__(
        self, worth: Floats, counts: Integers, weight: Floats, room: Floats, prices: Floats
    ) -> None:
        self._worth, self._weight, self._room, self._prices = worth, weight, room, prices
        of_node = prices @ weight
        paid = worth - of_node[:, None, :, None] * counts
        self.best = paid.max(axis=(2, 3))
        self._bounds = prices @ room + self.best.sum(axis=1)
        self.bound = float(self._bounds.min())
        # Of each choice: by how much it lowers each bound.
        self._losses = self.best[:, :, None, None] - paid

    def above(self, target: float, most_states: int) -> tuple[Integers, float] | None:
        """The best allocation and its value, if that is above the target; else None.

        Raises
        ------
        _TooMany
            If more than ``most_states`` partial allocations have to be kept.
        """
        slack = self._bounds - target
        near = (self._losses < slack[:, None, None, None]).all(axis=0)
        if not near.any(axis=(1, 2)).all():
            return None
        each = np.where(near, self._losses[0], np.inf).reshape(len(near), -1)
        second = np.partition(each, 1, axis=1)[:, 1] if each.shape[1] > 1 else each[:, 0]
        weight, room = self._weight.T.astype(np.int64), self._room
        radix = np.cumprod(np.append(1.0, self._room[: near.shape[1] - 1] + 1)).astype(np.int64)
        # Those with one choice left have it; the others follow, those with most to lose first.
        certain = near.sum(axis=(1, 2)) == 1
        bid, node_class, count = np.nonzero(near & certain[:, None, None])
        use = np.zeros((1, near.shape[1]), dtype=np.int64)
        np.add.at(use[0], node_class, count)
        value = self._worth[bid, node_class, count].sum(keepdims=True)
        # Of each partial allocation, how far it is above the target at each price.
        left = (slack - self._losses[:, bid, node_class, count].sum(axis=1))[:, None]
        nobody = np.zeros(1, dtype=np.int64)
        stages = [
            _Stage(int(j), nobody, node_class[i : i + 1], count[i : i + 1])
            for i, j in enumerate(bid)
        ]
        order = np.argsort(-second, kind='stable')
        for j in order[~certain[order]].tolist():
            node_class, count = np.nonzero(near[j])
            losses = self._losses[:, j, node_class, count]
            # The first prices leave out most, so that the others are looked at for few.
            parent, choice = np.nonzero(left[0][:, None] > losses[0])
            after = left[:, parent] - losses[:, choice]
            new_use = use[parent]
            new_use[np.arange(len(parent)), node_class[choice]] += count[choice]
            fits = (after > 0).all(axis=0) & (new_use @ weight <= room).all(axis=1)
            value = (value[parent] + self._worth[j, node_class, count][choice])[fits]
            same = (new_use @ radix)[fits]
            if not len(same):
                return None
            ranked = np.lexsort((-value, same))
            first = ranked[np.append(True, same[ranked[1:]] != same[ranked[:-1]])]
            if len(first) > most_states:
                raise _TooMany
            value, kept = value[first], np.flatnonzero(fits)[first]
            parent, choice, use, left = parent[kept], choice[kept], new_use[kept], after[:, kept]
            stages.append(_Stage(j, parent, node_class[choice], count[choice]))
        if (left <= 0).any() or (use @ self._weight.T > self._room).any():
            return None  # where all had one choice
        if value.max() <= target:
            return None  # the bounds count nodes that are left over as if they were of use
        best = int(value.argmax())
        return self._traced(stages, best), float(value[best])

    def _traced(self, stages: list[_Stage], last: int) -> Integers:
        found = np.zeros(self._worth.shape[:2], dtype=np.int64)
        for stage in reversed(stages):
            found[stage.bid, stage.node_class[last]] = stage.count[last]
            last = int(stage.parent[last])
        return found
