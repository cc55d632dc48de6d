"""From the problem as users state it to the one that solvers solve: a pure function, and the checks that need more than one field."""

from __future__ import annotations

import math
from collections import Counter

from parsl_freetrain.cli.problems import MOST_NODES, ProblemLine, TrainerLine
from parsl_freetrain.core.allocation import Bid, Block, Limit, Problem
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.limits import owner_limits, pool_limits
from parsl_freetrain.core.objectives import Candidate, Metric, objective_named
from parsl_freetrain.core.words import Efficiency, ScalingCurve


def problem_of(line: ProblemLine, objective: Metric | None = None) -> Problem:
    """The allocation problem that a line states.

    Parameters
    ----------
    objective
        Used in place of the one that the line names; where both are absent it is throughput.

    Raises
    ------
    BadInput
        Naming the trainer and the field that contradict something.
    """
    metric = objective or objective_named('throughput' if line.objective is None else line.objective)
    blocks = _blocks(line)
    pool = sum(block.nodes for block in blocks) if line.blocks is not None else line.nodes or 0
    _refuse_twice('trainers', 'name', [trainer.name for trainer in line.trainers])
    if pool > MOST_NODES:
        raise BadInput(f'the blocks have {pool} nodes; the most is {MOST_NODES}.')
    bids = tuple(_bid(line, trainer, blocks, pool, metric) for trainer in line.trainers)
    _check_current(line, blocks, pool, bids)
    return Problem(line.horizon_s, pool, bids, blocks, line.spans_blocks, _limits(line, pool))


def _blocks(line: ProblemLine) -> tuple[Block, ...]:
    if line.blocks is None:
        if line.nodes is None:
            raise BadInput('the field nodes is missing (or blocks in its place).')
        return ()
    if line.nodes is not None:
        raise BadInput('both nodes and blocks are given; give one of them.')
    _refuse_twice('blocks', 'id', [block.id for block in line.blocks])
    return tuple(Block(b.id, b.nodes, math.inf if b.remaining_s is None else b.remaining_s) for b in line.blocks)


def _bid(line: ProblemLine, trainer: TrainerLine, blocks: tuple[Block, ...], pool: int, metric: Metric) -> Bid:
    where = f'trainer {trainer.name!r}: '
    if trainer.min_nodes > trainer.max_nodes:
        raise BadInput(f'{where}min_nodes is {trainer.min_nodes}, above max_nodes, which is {trainer.max_nodes}.')
    curve = _curve(trainer, where)
    sizes = tuple(sorted(set(trainer.sizes or ())))
    if sizes and not any(trainer.min_nodes <= n <= trainer.max_nodes for n in sizes):
        raise BadInput(f'{where}none of sizes is from min_nodes to max_nodes, {trainer.min_nodes} to {trainer.max_nodes}.')
    if trainer.share > max((n for n in sizes if n <= trainer.max_nodes), default=trainer.max_nodes):
        raise BadInput(f'{where}share is {trainer.share} nodes; it may never have so many.')
    held = _held(line, trainer, where)
    current = sum(held) if line.blocks is not None else trainer.current_nodes or 0
    worth = metric(Candidate(
        trainer.name, curve, trainer.min_nodes, max(min(trainer.max_nodes, pool), min(current, pool)), trainer.priority,
        trainer.deadline_s, trainer.remaining_samples, _efficiency(trainer, where), trainer.waited_s))
    lately = trainer.since_rescale_s is not None and trainer.since_rescale_s < line.min_rescale_interval_s
    return Bid(trainer.name, trainer.min_nodes, trainer.max_nodes, current, trainer.rescale_up_s, trainer.rescale_down_s, worth,
               held if len(blocks) > 1 else (), sizes, fixed=lately and current > 0,
               shortest_s=trainer.shortest_s)


def _curve(trainer: TrainerLine, where: str) -> ScalingCurve:
    points = _points(trainer.nodes, trainer.rate, 'nodes', 'rate', where)
    first = min(points)
    if points.get(0, 0.0) != 0.0:
        raise BadInput(f'{where}rate is {points[0]:g} at 0 nodes; it must be 0 there.')
    if first > max(trainer.min_nodes, 1):
        raise BadInput(f'{where}nodes starts at {first}, above min_nodes, which is {trainer.min_nodes}; '
                       f'the rate must be known from min_nodes on.')
    return ScalingCurve.from_points(points)


def _efficiency(trainer: TrainerLine, where: str) -> Efficiency | None:
    if trainer.efficiency is None:
        return None
    points = _points(trainer.efficiency.nodes, trainer.efficiency.value, 'efficiency.nodes', 'efficiency.value', where)
    return Efficiency(tuple(sorted(points)), tuple(value for _, value in sorted(points.items())))


def _points(nodes: list[int], values: list[float], first: str, second: str, where: str) -> dict[int, float]:
    """Pairs of a count and a value, which belong together in whatever order they come."""
    if len(nodes) != len(values):
        raise BadInput(f'{where}{first} has {len(nodes)} entries and {second} {len(values)}; they go in pairs.')
    for count, times in Counter(nodes).items():
        if times > 1:
            raise BadInput(f'{where}{first} has {count} {times} times; each count may be there once.')
    return dict(zip(nodes, values, strict=True))


def _held(line: ProblemLine, trainer: TrainerLine, where: str) -> tuple[int, ...]:
    if line.blocks is None:
        if trainer.current is not None:
            raise BadInput(f'{where}current is for problems with blocks; give current_nodes.')
        return ()
    if trainer.current_nodes is not None:
        raise BadInput(f'{where}current_nodes is for problems without blocks; give current, the nodes in each block.')
    held = dict(trainer.current or {})
    counts = tuple(held.pop(block.id, 0) for block in line.blocks)
    if held:
        raise BadInput(f'{where}current names the block {next(iter(held))!r}, which is not among the blocks.')
    return counts


def _check_current(line: ProblemLine, blocks: tuple[Block, ...], pool: int, bids: tuple[Bid, ...]) -> None:
    field = 'current_nodes' if line.blocks is None else 'current'
    taken = 0
    for bid in bids:
        if bid.current_nodes > pool:
            raise BadInput(f'trainer {bid.name!r}: {field} is {bid.current_nodes} in all, and the pool has {pool} nodes.')
        taken += bid.current_nodes
        if taken > pool:
            raise BadInput(f'trainer {bid.name!r}: with its {field} the trainers hold {taken} nodes, and the pool has {pool}.')
    for b, block in enumerate(blocks if len(blocks) > 1 else ()):
        taken = 0
        for bid in bids:
            taken += bid.held[b]
            if taken > block.nodes:
                raise BadInput(f'trainer {bid.name!r}: with its current the trainers hold {taken} nodes of block {block.name!r}, '
                               f'which has {block.nodes}.')


def _limits(line: ProblemLine, pool: int) -> tuple[Limit, ...]:
    limits = pool_limits(pool, line.max_nodes, line.keep_free)
    if line.budget_node_s is not None:
        limits.append(Limit(node_s=line.budget_node_s, why='budget'))
    limits += [Limit((trainer.name,), least=trainer.share, why=f'share of {trainer.name}') for trainer in line.trainers if trainer.share]
    limits += owner_limits('user', [(t.name, t.user) for t in line.trainers], line.user_nodes, line.user_budget_node_s)
    limits += owner_limits('group', [(t.name, t.group) for t in line.trainers], line.group_nodes, line.group_budget_node_s)
    return tuple(limits)


def _refuse_twice(what: str, field: str, names: list[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise BadInput(f'{times} of the {what} have the {field} {name!r}; give each its own.')
