"""The allocation problem, an answer, and its value: docs/allocation.md states it as mathematics."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from msgspec import convert, to_builtins

from parsl_freetrain.core.model.types import ScalingCurve, rate_together


@dataclass(frozen=True)
class Capacity:
    """Interchangeable nodes that are there for the same time."""

    name: str  #: unique within a problem
    nodes: int  #: how many
    remaining_s: float = math.inf  #: seconds until they leave; infinite where no end is known
    node_class: str = ''  #: their kind, such as 'a100'; nodes of one block are alike


_USELESS = ScalingCurve((0,), (0.0,))


@dataclass(frozen=True)
class Bid:
    """One trainer as the allocator sees it."""

    name: str  #: the trainer
    min_nodes: int  #: with ``max_nodes``: it gets 0 nodes or a count in this range
    max_nodes: int
    #: What it holds; leaving it costs ``rescale_up_s`` or ``rescale_down_s`` of the current rate.
    current_nodes: int
    rescale_up_s: float
    rescale_down_s: float
    #: What a node count is worth per second: the objective's view of the trainer's scaling curve.
    curve: ScalingCurve
    #: ``current_nodes`` by block, as :attr:`Problem.blocks`; empty: one block, or nothing.
    held: tuple[int, ...] = ()
    #: The only counts it may get, besides 0; empty: every one in the range.
    sizes: tuple[int, ...] = ()
    #: Rescaled too recently: it keeps what it holds, if it can, even if that is nothing.
    fixed: bool = False
    #: Seconds for which nodes must stay for it to start on them; it may go on with its own.
    shortest_s: float = 0.0
    #: By class, in place of ``curve``; it uses no others. Empty: ``curve`` holds for all.
    class_curves: tuple[tuple[str, ScalingCurve], ...] = ()
    #: The class of the nodes that it holds; empty where they are of several.
    current_class: str = ''
    #: If above 0, it may hold nodes of several classes at once; see :meth:`mixed_rate`.
    mixed_parts: int = 0
    current_mix: tuple[tuple[str, int], ...] = ()  #: what it holds by class, if so

    def curve_on(self, node_class: str) -> ScalingCurve:
        """What node counts of this class are worth per second; 0 if it does not use the class."""
        if not self.class_curves:
            return self.curve
        return dict(self.class_curves).get(node_class, _USELESS)

    def uses(self, node_class: str) -> bool:
        return not self.class_curves or any(name == node_class for name, _ in self.class_curves)

    def counts(self, nodes: int) -> list[int]:
        """The counts above 0, increasing, that it may get out of ``nodes``."""
        most = min(self.max_nodes, nodes)
        if self.sizes:
            return [n for n in sorted(set(self.sizes)) if max(self.min_nodes, 1) <= n <= most]
        return list(range(max(self.min_nodes, 1), most + 1))

    def usable(self, nodes: int) -> int:
        """The largest allowed count that ``nodes`` suffice for; 0 if they are too few."""
        if not self.sizes:
            return min(nodes, self.max_nodes) if nodes >= max(self.min_nodes, 1) else 0
        fewest, most = max(self.min_nodes, 1), min(nodes, self.max_nodes)
        return max((n for n in self.sizes if fewest <= n <= most), default=0)

    @property
    def current_rate(self) -> float:
        """Value per second of the nodes that it holds; 0 below ``min_nodes``."""
        if self.current_nodes < self.min_nodes:
            return 0.0
        if self.current_mix:
            return self.mixed_rate(self.current_mix)
        return self.curve_on(self.current_class).rate_at(self.current_nodes)

    def mixed_rate(self, nodes: Iterable[tuple[str, int]]) -> float:
        """Value per second of (class, number): each node gets its share of the batch by speed."""
        there = [(name, count) for name, count in nodes if count]
        left = used = self.usable(sum(count for _, count in there))
        workers = []
        for rate, count in sorted(
            ((self.curve_on(name).rate_at(used), count) for name, count in there), reverse=True
        ):
            if rate > 0 and left:
                workers.append((rate / used, min(count, left)))
                left -= min(count, left)
        return rate_together(self.mixed_parts, tuple(workers)) if workers else 0.0


@dataclass(frozen=True)
class Limit:
    """A side constraint on some trainers together."""

    members: tuple[str, ...] = ()  #: names of the bids that it is about; empty: all
    #: With ``most`` (None: no cap): the fewest and most nodes that they hold in total.
    least: int = 0
    most: int | None = None
    #: The most node-seconds within the horizon (of a block at most its rest); None: no budget.
    node_s: float | None = None
    #: Where it comes from, for explanations: 'user anna', 'group physics', 'nodes kept free'.
    why: str = ''

    def concerns(self, name: str) -> bool:
        return not self.members or name in self.members


@dataclass(frozen=True)
class Problem:
    """Which trainer gets how many of ``nodes`` nodes for the next ``horizon_s`` seconds?"""

    horizon_s: float  #: how far the decision looks ahead, in seconds
    nodes: int  #: how many nodes there are to give away, in all blocks
    bids: tuple[Bid, ...]  #: the trainers; names are unique
    blocks: tuple[Capacity, ...] = ()  #: empty: in one block without a known end
    #: Whether a trainer may hold nodes of several blocks at once; they are of one class.
    spans_blocks: bool = True
    limits: tuple[Limit, ...] = ()  #: side constraints

    @cached_property
    def places(self) -> tuple[Capacity, ...]:
        """The blocks; where none were named, the one that holds all nodes."""
        return self.blocks or (Capacity('', self.nodes),)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """For how long the nodes of each of :attr:`places` are used: min(horizon, remaining)."""
        return tuple(min(self.horizon_s, block.remaining_s) for block in self.places)

    def members(self, limit: Limit) -> tuple[int, ...]:
        return tuple(j for j, bid in enumerate(self.bids) if limit.concerns(bid.name))

    @cached_property
    def held_fits(self) -> bool:
        """Whether each block has the nodes held in it, so that everything can stay."""
        held = [bid.held for bid in self.bids if bid.held]
        in_first = sum(bid.current_nodes for bid in self.bids if not bid.held)
        totals = [sum(counts) for counts in zip(*held, strict=True)] or [0] * len(self.places)
        used = zip([totals[0] + in_first, *totals[1:]], self.places, strict=True)
        return all(total <= block.nodes for total, block in used)

    def held(self, bid: Bid) -> tuple[int, ...]:
        return bid.held or (bid.current_nodes, *(0 for _ in self.places[1:]))

    def barred(self, bid: Bid) -> tuple[int, ...]:
        """Indices of the :attr:`places` that end too soon for the bid, or whose class it avoids."""
        if bid.shortest_s <= self._first_end and not bid.class_curves:
            return ()
        return tuple(
            b
            for b, block in enumerate(self.places)
            if block.remaining_s < bid.shortest_s or not bid.uses(block.node_class)
        )

    @cached_property
    def places_by_class(self) -> dict[str, tuple[int, ...]]:
        by_class: dict[str, tuple[int, ...]] = {}
        for b, block in enumerate(self.places):
            by_class[block.node_class] = (*by_class.get(block.node_class, ()), b)
        return by_class

    def classes_of(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """The classes of ``nodes``, a count for each of :attr:`places`."""
        if len(self.places_by_class) == 1:
            return (self.places[0].node_class,) if any(nodes) else ()
        every = self.places_by_class.items()
        return tuple(one for one, places in every if any(nodes[b] for b in places))

    def can_go_on(self, bid: Bid) -> bool:
        """Whether a bid may keep exactly what it holds, as far as that is its own matter."""
        return bid.usable(bid.current_nodes) == bid.current_nodes and (
            self.spans_blocks or sum(1 for n in self.held(bid) if n) <= 1
        )

    def value(self, bid: Bid, nodes: Sequence[int]) -> float:
        """Worth of ``nodes`` (a count for each of :attr:`places`) to a bid over the horizon, in the
        curve's unit x seconds: horizon x rate(nodes) - rescale cost x rate(current), as published
        (BFTrainer, arXiv 2106.12091). Between the ends of blocks the trainer runs on whatever is
        still there, as far as it can use it (:meth:`Bid.usable`). An end that takes some costs
        ``rescale_down_s`` seconds of its rate until then; as many but other nodes cost as growing.
        Several classes at once are worth minus infinity, unless it divides batches among them.
        """
        total = sum(nodes)
        classes = self.classes_of(nodes)
        if len(classes) > 1 and not bid.mixed_parts:
            return -math.inf
        curve = bid.curve_on(classes[0] if classes else bid.current_class)
        cost_s = 0.0
        if (
            total > bid.current_nodes
            or not (set(dict(bid.current_mix)) or {bid.current_class}).issuperset(classes)
            or (total == bid.current_nodes and tuple(nodes) != self.held(bid))
        ):
            cost_s = bid.rescale_up_s
        elif total < bid.current_nodes:
            cost_s = bid.rescale_down_s
        worth = -cost_s * bid.current_rate
        since, left = 0.0, total
        for end in self._ends:
            there = zip(nodes, self.places, strict=True)
            going = sum(n for n, block in there if block.remaining_s == end)
            if going:
                rate = self._rate(bid, curve, nodes, left, since)
                worth += (end - since - bid.rescale_down_s) * rate
                since, left = end, left - going
        return worth + (self.horizon_s - since) * self._rate(bid, curve, nodes, left, since)

    def _rate(
        self, bid: Bid, curve: ScalingCurve, nodes: Sequence[int], left: int, since: float
    ) -> float:
        """Of those ``left`` of the nodes that stay for longer than ``since``."""
        if not bid.mixed_parts:
            return curve.rate_at(bid.usable(left))
        whole = left == sum(nodes)
        each = ((place, n) for n, place in zip(nodes, self.places, strict=True))
        there = ((place.node_class, n) for place, n in each if whole or place.remaining_s > since)
        return bid.mixed_rate(there)

    @cached_property
    def _first_end(self) -> float:
        return min(block.remaining_s for block in self.places)

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        ends = {block.remaining_s for block in self.places}
        return tuple(sorted(end for end in ends if end < self.horizon_s))

    def objective(self, allocation: Mapping[str, int | Sequence[int]]) -> float:
        """Value in the curves' unit x seconds of nodes by trainer, or by trainer and place."""
        given = ((bid, allocation.get(bid.name, (0,) * len(self.places))) for bid in self.bids)
        return sum(self.value(bid, (n,) if isinstance(n, int) else n) for bid, n in given)


MOST_POINTS = 20_000  # problems whose curves have more points than this in all are not recorded


def record_of(problem: Problem) -> dict[str, Any] | None:
    """A problem as it is recorded; None if it is too large. :func:`problem_in` reads it."""
    curves = [c for bid in problem.bids for _, c in (*bid.class_curves, ('', bid.curve))]
    if sum(len(curve.nodes) for curve in curves) > MOST_POINTS:
        return None
    found: dict[str, Any] = to_builtins(problem)
    return found


def problem_in(record: dict[str, Any]) -> Problem:
    return convert(record, Problem)


def relative_gap(objective: float, bound: float | None) -> float | None:
    """``(bound - objective) / bound``, 0 where the objective reaches it; None without a bound."""
    if bound is None:
        return None
    size = max(abs(bound), abs(objective))
    return max(bound - objective, 0.0) / size if size > 0 else 0.0


@dataclass(frozen=True)
class Answer:
    #: 'optimal' (to 1e-9 of the objective), 'feasible' (time ran out; never worse than staying) or
    #: 'infeasible' (no allocation keeps all limits, or none was found: what runs is kept).
    status: str
    objective: float  #: its value, by :meth:`Problem.objective`
    solver: str  #: name of the solver
    seconds: float  #: how long that took
    #: Nodes by trainer; every bid's name is a key.
    allocation: dict[str, int] = field(default_factory=dict)
    #: Nodes by trainer and block, without zeros; empty where the problem names no blocks.
    by_block: dict[str, dict[str, int]] = field(default_factory=dict)
    staying: float = 0.0  #: the objective of keeping what runs, as far as it can be kept
    #: No allocation is worth more; None: none keeps all limits, or no bound is known.
    bound: float | None = None

    @property
    def gap(self) -> float | None:
        """``(bound - objective) / bound``: by how much the optimum could be better at most."""
        return relative_gap(self.objective, self.bound)


class Allocator(Protocol):
    def allocate(self, problem: Problem) -> Answer: ...
