"""Allocation problems, random and recorded, and all allocations that the rules allow."""

import gzip
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from operator import le
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from parsl_freetrain.core.allocation.feasibility import by_place, is_allowed, stay_put
from parsl_freetrain.core.allocation.problem import Answer, Bid, Capacity, Limit, Problem
from parsl_freetrain.core.allocation.problem_document import check, decode, problem_of
from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.solver import allocator_named

DECISIONS = Path(__file__).resolve().parents[2].parent / 'shared' / 'data' / 'allocation'
LINEAR = ScalingCurve.from_points({1: 10.0, 64: 640.0})


def bid(
    name: str,
    current: int = 0,
    low: int = 1,
    high: int = 64,
    curve: ScalingCurve = LINEAR,
    up_s: float = 18.0,
    down_s: float = 12.0,
    **more: Any,
) -> Bid:
    return Bid(name, low, high, current, up_s, down_s, curve, **more)


def feasible(problem: Problem) -> Iterator[dict[str, tuple[int, ...]]]:
    """All allocations that the rules allow, computed independently of the solvers."""
    sizes = [block.nodes for block in problem.blocks] or [problem.nodes]
    ways = list(itertools.product(*(range(n + 1) for n in sizes)))
    if not problem.spans_blocks:
        ways = [way for way in ways if sum(n > 0 for n in way) <= 1]
    keep = keepers(problem, sizes)

    def may(b: Bid, way: tuple[int, ...]) -> bool:
        fits = b.min_nodes <= sum(way) <= b.max_nodes and (not b.sizes or sum(way) in b.sizes)
        return sum(way) == 0 or (fits and in_time(problem, b, way))

    choices = [
        [keep[b.name]] if b.name in keep else [way for way in ways if may(b, way)]
        for b in problem.bids
    ]
    for picked in itertools.product(*choices):
        totals = [sum(column) for column in zip(*picked, strict=True)] or [0] * len(sizes)
        if all(t <= n for t, n in zip(totals, sizes, strict=True)):
            allocation = {b.name: way for b, way in zip(problem.bids, picked, strict=True)}
            one_class = all(
                len(problem.classes_of(way)) <= 1 or b.mixed_parts
                for b, way in zip(problem.bids, picked, strict=True)
            )
            if one_class and all(kept_by(problem, limit, allocation) for limit in problem.limits):
                yield allocation


def in_time(problem: Problem, b: Bid, way: tuple[int, ...]) -> bool:
    """Whether the trainer keeps its nodes, or all its nodes stay long enough for a start."""
    held = b.held or (b.current_nodes,) + (0,) * (len(way) - 1)
    remaining = [block.remaining_s for block in problem.blocks] or [math.inf]
    usable = [not b.class_curves or c in dict(b.class_curves) for c in classes(problem)]
    return way == held or all(
        r >= b.shortest_s and u for n, r, u in zip(way, remaining, usable, strict=True) if n
    )


def classes(problem: Problem) -> list[str]:
    """The node class of each block."""
    return [block.node_class for block in problem.blocks] or ['']


def keepers(problem: Problem, sizes: list[int]) -> dict[str, tuple[int, ...]]:
    """The fixed bids that keep their nodes, in order, as long as there are enough nodes."""
    keep: dict[str, tuple[int, ...]] = {}
    for b in problem.bids:
        held = b.held or (b.current_nodes,) + (0,) * (len(sizes) - 1)
        allowed = b.current_nodes == 0 or (
            b.min_nodes <= b.current_nodes <= b.max_nodes
            and (not b.sizes or b.current_nodes in b.sizes)
        )
        together = [sum(column) for column in zip(held, *keep.values(), strict=True)]
        whole = problem.spans_blocks or sum(n > 0 for n in held) <= 1
        if b.fixed and allowed and whole and all(map(le, together, sizes)):
            keep[b.name] = held
    return keep


def kept_by(problem: Problem, limit: Limit, allocation: dict[str, tuple[int, ...]]) -> bool:
    members = [way for n, way in allocation.items() if n in limit.members or not limit.members]
    nodes = sum(map(sum, members))
    seconds = [min(block.remaining_s, problem.horizon_s) for block in problem.blocks] or [
        problem.horizon_s
    ]
    used = sum(n * s for way in members for n, s in zip(way, seconds, strict=True))
    return (
        limit.least <= nodes
        and (limit.most is None or nodes <= limit.most)
        and (limit.node_s is None or used <= limit.node_s)
    )


def by_hand(problem: Problem, allocation: dict[str, int]) -> float:
    """The objective without blocks, as the contract of ``freetrain allocate`` defines it."""
    total = 0.0
    for b in problem.bids:
        points = {0: 0.0} | dict(zip(b.curve.nodes, b.curve.rate, strict=True))
        n, c = allocation[b.name], b.current_nodes
        now = linear(points, c) if c >= b.min_nodes else 0.0
        total += problem.horizon_s * linear(points, n)
        total -= (b.rescale_up_s if n > c else b.rescale_down_s if n < c else 0.0) * now
    return total


def second_by_second(problem: Problem, allocation: dict[str, tuple[int, ...]]) -> float:
    """The objective with blocks, from one block end to the next for each trainer."""
    total = 0.0
    for b in problem.bids:
        way = dict(enumerate(allocation[b.name]))
        held = b.held or (b.current_nodes,) + (0,) * (len(way) - 1)
        old = {classes(problem)[i] for i, n in enumerate(held) if n} or {b.current_class}
        now = 0.0
        if b.current_nodes >= b.min_nodes:
            now = running(problem, b, dict(enumerate(held)), allowed=True)
        count = sum(way.values())
        used = {classes(problem)[i] for i, n in way.items() if n}
        if not used <= old:
            total -= b.rescale_up_s * now
        elif count < b.current_nodes:
            total -= b.rescale_down_s * now
        elif count > b.current_nodes or tuple(way.values()) != held:
            total -= b.rescale_up_s * now
        time = 0.0
        for end in sorted(
            {block.remaining_s for block in problem.blocks if block.remaining_s < problem.horizon_s}
        ):
            total += (end - time) * running(problem, b, way)
            leaving = [i for i in way if problem.blocks[i].remaining_s == end]
            if any(way[i] for i in leaving):
                total -= b.rescale_down_s * running(problem, b, way)
            for i in leaving:
                del way[i]
            time = end
        total += (problem.horizon_s - time) * running(problem, b, way)
    return total


def class_curve(b: Bid, node_class: str) -> ScalingCurve:
    if not b.class_curves:
        return b.curve
    return dict(b.class_curves).get(node_class, ScalingCurve((0,), (0.0,)))


def running(problem: Problem, b: Bid, way: dict[int, int], *, allowed: bool = False) -> float:
    """Rate at the largest allowed count of the nodes there are; ``allowed``: all may be used."""
    there = sum(way.values())
    sizes = b.sizes or range(there + 1)
    counts = [n for n in range(1, there + 1) if b.min_nodes <= n <= b.max_nodes and n in sizes]
    most = there if allowed and not b.mixed_parts else max(counts, default=0)
    each = [
        class_curve(b, classes(problem)[i]).rate_at(most) for i, n in way.items() for _ in range(n)
    ]
    rates = sorted(each, reverse=True)[:most]
    if not b.mixed_parts:
        return rates[0] if rates else 0.0
    return dealt(b.mixed_parts, [rate / most for rate in rates if rate > 0])


def dealt(parts: int, speeds: list[float]) -> float:
    """The best rate of any division of equal parts among nodes, when all are done."""
    times = sorted(n / speed for speed in speeds for n in range(1, parts + 1))
    for time in times:
        if sum(math.floor(time * speed * (1 + 1e-12)) for speed in speeds) >= parts:
            return parts / time
    return 0.0


def linear(points: dict[int, float], n: int) -> float:
    xs = sorted(points)
    if n >= xs[-1]:
        return points[xs[-1]]
    left = max(x for x in xs if x <= n)
    right = min(x for x in xs if x > n)
    return points[left] + (points[right] - points[left]) * (n - left) / (right - left)


def rounding(problem: Problem) -> float:
    """Tolerance for sums in another order: exact only relative to the size of their terms."""
    return 1e-14 * sum(
        (problem.horizon_s + b.rescale_up_s + b.rescale_down_s)
        * max(max(curve.rate) for curve in (b.curve, *dict(b.class_curves).values()))
        for b in problem.bids
    )


def assert_valid(problem: Problem, answer: Answer) -> None:
    """The answer obeys all rules, and its objective is the worth of the allocation."""
    nodes = by_place(problem, answer)
    assert is_allowed(problem, nodes)
    assert {name: sum(counts) for name, counts in nodes.items()} == answer.allocation
    assert answer.staying == pytest.approx(
        problem.objective(stay_put(problem)), rel=1e-12, abs=rounding(problem)
    )
    assert answer.objective == pytest.approx(
        problem.objective(nodes), rel=1e-12, abs=rounding(problem)
    )
    if not problem.blocks:
        assert answer.objective == pytest.approx(
            by_hand(problem, answer.allocation), rel=1e-12, abs=rounding(problem)
        )


def assert_not_worse_than_staying(problem: Problem, answer: Answer) -> None:
    assert_valid(problem, answer)
    stays = stay_put(problem)
    if is_allowed(problem, stays):  # what runs may be beyond a new limit
        assert answer.objective >= problem.objective(stays) - rounding(problem)


@st.composite
def curves(draw: st.DrawFn) -> ScalingCurve:
    """Of any shape: convex, with dips, flat, without a point at 0, short, long; any units."""
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True).map(sorted))
    unit = draw(st.sampled_from([1e-3, 1.0, 2831.0, 1e6]))
    rates = draw(st.lists(st.integers(0, 40), min_size=len(counts), max_size=len(counts)))
    return ScalingCurve(
        tuple(counts),
        tuple(0.0 if n == 0 else unit * r for n, r in zip(counts, rates, strict=True)),
    )


SECONDS_UP = st.sampled_from([0.0, 0.7, 18.0, 500.0])
SECONDS_DOWN = st.sampled_from([0.0, 0.3, 12.0, 500.0])


@st.composite
def problems(draw: st.DrawFn, constrained: bool = False) -> Problem:
    """Current counts may be impossible. ``constrained``: with sizes, fixed trainers and limits."""
    nodes = draw(st.integers(0, 8))
    bids = []
    for j in range(draw(st.integers(1, 4))):
        low = draw(st.integers(1, 5))
        sizes = tuple(draw(st.lists(st.integers(1, 8), max_size=3))) if constrained else ()
        high, current = draw(st.integers(low, 12)), draw(st.integers(0, 12))
        costs = draw(SECONDS_UP), draw(SECONDS_DOWN), draw(curves())
        fixed = constrained and draw(st.booleans())
        bids.append(Bid(f't{j}', low, high, current, *costs, (), sizes, fixed))
    if draw(st.booleans()):  # equal trainers
        bids = [replace(bids[0], name=f't{j}') for j in range(len(bids))]
    horizon_s = draw(st.sampled_from([0.5, 10.0, 120.0, 3600.0]))
    limits = (
        tuple(draw(st.lists(limit_on_one_or_all(len(bids), horizon_s), max_size=2)))
        if constrained
        else ()
    )
    return Problem(horizon_s, nodes, tuple(bids), limits=limits)


def limit_on_one_or_all(bids: int, horizon_s: float) -> st.SearchStrategy[Limit]:
    most, node_s = st.integers(0, 8), st.integers(0, 9).map(lambda n: n * horizon_s)
    more = st.none() | most, st.none() | node_s
    name = st.integers(0, bids - 1).map(lambda j: (f't{j}',))
    one = st.builds(Limit, name, st.integers(0, 3), *more)
    every = st.builds(Limit, st.just(()), st.just(0), *more)
    return one | every


@st.composite
def problems_with_blocks(
    draw: st.DrawFn,
    names: tuple[str, ...] = ('',),
    ends: tuple[float, ...] = (0.1, 0.4, 0.7, 1.0, 1.5, math.inf),
) -> Problem:
    """With one to three small blocks of ``names``, some too short; any spanning and limits."""
    horizon_s = draw(st.sampled_from([10.0, 120.0]))
    places = [
        (
            draw(st.integers(0, 3)),
            draw(st.sampled_from(ends)) * horizon_s,
            draw(st.sampled_from(names)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    blocks = tuple(Capacity(f'b{i}', *place) for i, place in enumerate(places))
    fits = draw(st.booleans())
    left = [block.nodes if fits else 4 for block in blocks]
    bids = []
    for j in range(draw(st.integers(1, 3))):
        its_class = draw(st.sampled_from(names))
        held = tuple(
            draw(st.integers(0, n)) if block.node_class == its_class else 0
            for n, block in zip(left, blocks, strict=True)
        )
        used = draw(st.lists(st.sampled_from(names), unique=True)) if len(names) > 1 else []
        if sum(held) and used and its_class not in used:
            used.append(its_class)
        if fits:
            left = [n - h for n, h in zip(left, held, strict=True)]
        low = draw(st.integers(1, 3))
        sizes = tuple(draw(st.lists(st.integers(1, 8), max_size=3)))
        high, costs = (
            draw(st.integers(low, 9)),
            (draw(SECONDS_UP), draw(SECONDS_DOWN), draw(curves())),
        )
        told = held if sum(held) or len(names) > 1 or draw(st.booleans()) else ()
        fixed = draw(st.integers(0, 5)) == 0
        shortest_s = draw(st.sampled_from([0.0, 0.0, 0.2, 0.5, 1.2, 2.0])) * horizon_s
        by_class = tuple((name, draw(curves())) for name in used)
        its_class = its_class if sum(held) else ''
        made = Bid(f't{j}', low, high, sum(held), *costs, told, sizes, fixed, shortest_s)
        bids.append(replace(made, class_curves=by_class, current_class=its_class))
    who = [b.name for b in bids]
    members = st.lists(st.sampled_from(who), max_size=2, unique=True).map(tuple)
    least, most = st.sampled_from([0, 0, 0, 1, 2]), st.none() | st.integers(0, 5)
    node_s = st.none() | st.integers(0, 6).map(lambda n: n * 0.3 * horizon_s)
    limits = draw(st.lists(st.builds(Limit, members, least, most, node_s), max_size=2))
    nodes, spans = sum(block.nodes for block in blocks), draw(st.booleans())
    return Problem(horizon_s, nodes, tuple(bids), blocks, spans, tuple(limits))


def recorded() -> list[tuple[str, Problem, float]]:
    """Real decisions from the Summit trace: name, problem, optimum; empty without the data."""
    files = DECISIONS / 'summit-decisions.jsonl.gz', DECISIONS / 'summit-decisions-answers.jsonl.gz'
    if not all(path.exists() for path in files):
        return []
    with gzip.open(files[0], 'rt') as lines, gzip.open(files[1], 'rt') as answers:
        both = [(line, json.loads(answer)) for line, answer in zip(lines, answers, strict=True)]
    return [(a['id'], problem_of(check(decode(line))), a['optimum']) for line, a in both]


class Remembering:
    """An allocator that keeps the questions that it was asked."""

    def __init__(self) -> None:
        self.asked: list[Problem] = []
        self._allocator = allocator_named('auto', isolated=False)

    def allocate(self, problem: Problem) -> Answer:
        self.asked.append(problem)
        return self._allocator.allocate(problem)
