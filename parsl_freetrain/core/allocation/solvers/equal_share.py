"""Equal shares, then first come, first served: a heuristic, for comparison."""

from parsl_freetrain.core.allocation.feasibility import is_allowed, pinned
from parsl_freetrain.core.allocation.problem import Answer, Bid, Problem
from parsl_freetrain.core.allocation.solution import Asked


class EqualShareAllocator:
    """BFTrainer's heuristic (arXiv 2106.12091): N // J nodes each; the rest go in order."""

    def allocate(self, problem: Problem) -> Answer:
        """Equal shares; where they break a limit, staying put with status 'infeasible'."""
        asked = Asked(problem, 'equal-share')
        found = _Dealing(problem).deal()
        allowed = is_allowed(problem, found)
        return asked.of('feasible', found) if allowed else asked.stay('infeasible')


class _Dealing:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._free = [block.nodes for block in problem.places]
        self._given = {bid.name: [0] * len(problem.places) for bid in problem.bids}

    def deal(self) -> dict[str, tuple[int, ...]]:
        problem = self._problem
        kept = pinned(problem)
        for name, nodes in kept.items():
            self._give(name, nodes)
        for bid in problem.bids:
            held = problem.held(bid)
            if (
                bid.name not in kept
                and any(held[b] for b in problem.barred(bid))
                and problem.can_go_on(bid)
                and (
                    sum(held) <= self._room(bid)
                    and all(n <= free for n, free in zip(held, self._free, strict=True))
                )
            ):
                kept[bid.name] = held
                self._give(bid.name, held)
        others = [bid for bid in problem.bids if bid.name not in kept]
        share = sum(self._free) // max(len(others), 1)
        for bid in others:
            self._grow(bid, share)
        for bid in others:
            self._grow(bid, bid.max_nodes)
        return {name: tuple(nodes) for name, nodes in self._given.items()}

    def _grow(self, bid: Bid, most: int) -> None:
        given, held = self._given[bid.name], self._problem.held(bid)
        now = sum(given)
        # First its own nodes, then places where it has nodes, then the place with most free nodes.
        short = self._problem.barred(bid)
        usable = [b for b in range(len(given)) if b not in short]
        order = sorted(usable, key=lambda b: (-given[b], -held[b], -self._free[b], b))
        if order:  # one class at a time, and one block where blocks are apart
            mine = self._problem.places_by_class[self._problem.places[order[0]].node_class]
            order = [b for b in order if b in mine] if self._problem.spans_blocks else order[:1]
        reach = now + min(sum(self._free[b] for b in order), self._room(bid))
        more = bid.usable(min(most, reach)) - now
        if more <= 0:
            return
        nodes = [0] * len(given)
        own = [min(free, max(held[b] - given[b], 0)) for b, free in enumerate(self._free)]
        for part in (own, self._free):
            for b in order:
                taken = min(part[b], self._free[b] - nodes[b], more)
                nodes[b] += taken
                more -= taken
        self._give(bid.name, nodes)

    def _give(self, name: str, nodes: tuple[int, ...] | list[int]) -> None:
        for b, more in enumerate(nodes):
            self._given[name][b] += more
            self._free[b] -= more

    def _room(self, bid: Bid) -> int:
        room = sum(self._free)
        for limit in self._problem.limits:
            if limit.concerns(bid.name):
                used = [nodes for name, nodes in self._given.items() if limit.concerns(name)]
                if limit.most is not None:
                    room = min(room, limit.most - sum(map(sum, used)))
                if limit.node_s is not None:
                    seconds = self._problem.seconds
                    left = limit.node_s - sum(
                        n * s for nodes in used for n, s in zip(nodes, seconds, strict=True)
                    )
                    room = min(room, int(left / max(*seconds, 1e-9)))
        return max(room, 0)
