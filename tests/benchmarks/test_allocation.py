"""How long decisions take: ``make bench BENCH_ARGS='-k allocation'``."""

import gc
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, process_time

import pytest

from parsl_freetrain.core.allocation import solution
from parsl_freetrain.core.allocation.problem import Allocator, Bid, Capacity, Problem
from parsl_freetrain.core.allocation.solution import grouped, groups_of
from parsl_freetrain.core.allocation.solvers.column_generation import ColumnAllocator
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.allocation.solvers.milp import IntegerProgram, MilpAllocator
from parsl_freetrain.core.model.types import ScalingCurve
from tests.benchmarks.workload import MACHINE
from tests.support.allocation import recorded
from tests.support.class_problems import class_problem

POINTS = (1, 2, 4, 8, 16, 32, 64)


def curve(draw: random.Random) -> ScalingCurve:
    """Bumpy, as measured ones are."""
    one, power = draw.uniform(500, 7000), draw.uniform(0.8, 0.97)
    return ScalingCurve(POINTS, tuple(one * n**power * draw.uniform(0.95, 1.02) for n in POINTS))


def problem(
    draw: random.Random, trainers: int, nodes: int, ends: int = 0, spans: bool = True
) -> Problem:
    """A third of the trainers wait, others hold up to 64 nodes; costs as on the Summit trace."""
    sizes = [nodes // (ends + 1)] * ends + [nodes - nodes // (ends + 1) * ends]
    blocks = tuple(
        Capacity(f'b{b}', n, draw.uniform(20, 110) if b < ends else math.inf)
        for b, n in enumerate(sizes)
    )
    left, bids = list(sizes), []
    for j in range(trainers):
        held, b = [0] * len(sizes), draw.randrange(len(sizes))
        held[b] = min(left[b], draw.choice([0, draw.randint(1, 64), draw.randint(1, 64)]))
        left[b] -= held[b]
        costs = draw.uniform(17, 19), draw.uniform(11, 13), curve(draw)
        bids.append(Bid(f't{j}', 1, 64, sum(held), *costs, tuple(held) if ends else ()))
    return Problem(120.0, nodes, tuple(bids), blocks if ends else (), spans)


def times(allocator: Callable[[], Allocator], problems: list[Problem]) -> list[float]:
    """Milliseconds for each, each by a new allocator, which remembers nothing."""
    found = []
    for one in problems:
        solver = allocator()
        began = perf_counter()
        solver.allocate(one)
        found.append(1e3 * (perf_counter() - began))
    return found


def shown(values: list[float]) -> str:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
    return (
        f'p50 {statistics.median(ordered):9.2f}   p99 {p99:9.2f}   max {ordered[-1]:9.2f} ms '
        f' (n = {len(ordered)})'
    )


def many(trainers: int, nodes: int, count: int) -> list[Problem]:
    return [problem(random.Random(seed), trainers, nodes) for seed in range(count)]


def test_allocation_by_size() -> None:
    print(f'\nOne decision on nodes without ends ({MACHINE})')
    times(MilpAllocator, many(2, 4, 1))  # imports
    sizes = (10, 100, 300), (30, 500, 300), (35, 1000, 300), (1000, 4734, 100), (1000, 10000, 100)
    for trainers, nodes, count in sizes:
        print(
            f'  {trainers:5} x {nodes:6}  dp          '
            f'{shown(times(DpAllocator, many(trainers, nodes, count)))}'
        )
    few = many(35, 1000, 20)
    modelling = []
    for one in few:
        began = perf_counter()
        IntegerProgram(one)
        modelling.append(1e3 * (perf_counter() - began))
    print(f'     35 x   1000  modelling   {shown(modelling)}')
    print(f'     35 x   1000  MILP, HiGHS {shown(times(MilpAllocator, few))}')
    for one in few[:5]:
        assert DpAllocator().allocate(one).objective == pytest.approx(
            MilpAllocator(60.0).allocate(one).objective, rel=1e-9
        )


def test_allocation_of_recorded_decisions() -> None:
    decisions = [one for _, one, _ in recorded()]
    if not decisions:
        pytest.skip('the recorded decisions are absent')
    print(
        f'\n{len(decisions)} recorded decisions of Summit, 10 to 30 trainers, up to '
        f'1,461 nodes ({MACHINE})'
    )
    print(f'  dp           {shown(times(DpAllocator, decisions))}')
    print(f'  MILP, HiGHS  {shown(times(MilpAllocator, decisions[::6]))}')


def test_allocation_with_ends() -> None:
    print(f'\nBlocks that end within the horizon, limit 10 s ({MACHINE})')
    for trainers, nodes, ends in ((10, 100, 1), (10, 100, 3), (35, 500, 1), (35, 500, 3)):
        some = [problem(random.Random(seed), trainers, nodes, ends) for seed in range(5)]
        print(
            f'  {trainers:5} x {nodes:5}, {ends} ends   columns     '
            f'{shown(times(ColumnAllocator, some))}'
        )
        if trainers == 10:
            print(
                f'  {trainers:5} x {nodes:5}, {ends} ends   MILP        '
                f'{shown(times(MilpAllocator, some[:3]))}'
            )
        alone = [problem(random.Random(s), trainers, nodes, ends, spans=False) for s in range(5)]
        print(
            f'  {trainers:5} x {nodes:5}, {ends} ends   MILP, one block each '
            f'{shown(times(MilpAllocator, alone))}'
        )
        assert (
            len(groups_of(some[0])) == len(grouped(some[0], groups_of(some[0])).places) == ends + 1
        )


def test_allocation_with_many_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gap after some CPU time, and CPU time until the proof; limits count CPU time here."""
    monkeypatch.setattr(solution, 'perf_counter', process_time)
    ColumnAllocator().allocate(problem(random.Random(0), 3, 12, 1))  # imports
    gc.freeze()  # the solver's own process has no other objects for the collector to look at
    print(f'\nBranch and price, limits in CPU time ({MACHINE})')
    for trainers, nodes, ends, limits, seeds in (
        (35, 500, 1, (0.05, 2.0), 100),
        (35, 500, 2, (0.05, 2.0), 100),
        (35, 500, 3, (0.05, 2.0), 100),
        (100, 4734, 10, (0.2, 2.0), 20),
    ):
        some = [problem(random.Random(seed), trainers, nodes, ends) for seed in range(seeds)]
        for limit_s in limits:
            answers = [ColumnAllocator(limit_s).allocate(one) for one in some]
            gaps = sorted(100 * (answer.gap or 0.0) for answer in answers)
            took = [1e3 * answer.seconds for answer in answers]
            proven = sum(answer.status == 'optimal' for answer in answers)
            print(
                f'  {trainers:5} x {nodes:5}, {ends:2} ends, {limit_s:4} s   gap %: median '
                f'{statistics.median(gaps):.3f}, 95 % of the seeds below '
                f'{gaps[math.ceil(0.95 * seeds) - 1]:.3f}; proven {proven} of {seeds}; '
                f'CPU {shown(took)}'
            )


def test_allocation_of_node_classes() -> None:
    """3 classes of 64 nodes, 60 trainers: all new, and after three ended and three came."""
    solver = ColumnAllocator(10.0)
    solver.allocate(class_problem(random.Random(0), 5, 8))  # imports
    new = [class_problem(random.Random(seed), 60, 64) for seed in range(100)]
    running = [
        in_its_course(one, class_problem(random.Random(1000 + seed), 60, 64), solver)
        for seed, one in enumerate(new)
    ]
    print(f'\n3 classes x 64 nodes x 60 trainers, CPU time ({MACHINE})')
    for name, some in (('everything new', new), ('in the course of a run', running)):
        took = []
        for one in some:
            began = process_time()
            answer = solver.allocate(one)
            took.append(1e3 * (process_time() - began))
            assert answer.status == 'optimal'
        print(f'  {name:24} {shown(took)}')


def in_its_course(before: Problem, then: Problem, solver: Allocator) -> Problem:
    """The next problem: nodes as the solver gave them, the first three trainers are new ones."""
    given = solver.allocate(before).by_block
    bids = []
    for j, bid in enumerate(before.bids):
        nodes = {} if j < 3 else given[bid.name]
        held = tuple(nodes.get(block.name, 0) for block in before.blocks)
        bids.append(
            replace(
                then.bids[j] if j < 3 else bid,
                current_nodes=sum(held),
                held=held,
                current_class=next(iter(nodes), ''),
            )
        )
    return replace(before, bids=tuple(bids))
