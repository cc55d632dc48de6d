"""Turns documents, in which users state problems, into problems for the solvers, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from parsl_freetrain.core.allocation.constraints import (
    KEPT_FREE,
    OWNERS,
    SHARE_OF,
    members_by_key,
    owner_limits,
    pool_limits,
)
from parsl_freetrain.core.allocation.objectives import (
    CHARGES_RESTARTS,
    Candidate,
    Metric,
    Running,
    by_class,
    objective_named,
)
from parsl_freetrain.core.allocation.problem import Bid, Block, Limit, Problem
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Efficiency, ScalingCurve

if TYPE_CHECKING:  # executors write documents and read none: they start without pydantic
    from parsl_freetrain.core.allocation.problem_document import ProblemDocument, TrainerDocument

T = TypeVar('T')

MOST_NODES = 1_000_000
"""The largest pool that a document may state."""

MOST_POINTS = 20_000
"""Problems whose curves have more points than this in all are not written as documents."""


def problem_of(stated: ProblemDocument, objective: Metric | None = None) -> Problem:
    """The allocation problem that a document states. ``objective``: replaces the objective that the
    document names; where both are absent it is throughput. Raises BadInput if fields contradict
    each other; the sentence names the trainer and the fields.
    """
    metric = objective or objective_named(
        'throughput' if stated.objective is None else stated.objective
    )
    blocks = _blocks(stated)
    pool = sum(block.nodes for block in blocks) if stated.blocks is not None else stated.nodes or 0
    _refuse_twice('trainers', 'name', (trainer.name for trainer in stated.trainers))
    if pool > MOST_NODES:
        raise BadInput(f'the blocks have {pool} nodes; the most is {MOST_NODES}.')
    bids = tuple(_bid(stated, trainer, blocks, pool, metric) for trainer in stated.trainers)
    _check_held(stated, blocks, pool, bids)
    return Problem(stated.horizon_s, pool, bids, blocks, stated.spans_blocks, _limits(stated, pool))


def document_of(problem: Problem) -> dict[str, Any] | None:
    """The document that states a problem, ready for JSON.

    The rates in it are what node counts are worth to the trainers, and its objective is
    'throughput'. The problem that is read from it has the same answer.

    Returns
    -------
    dict or None
        None if the problem is too large, or has limits that a document cannot state.
    """
    if sum(len(curve.nodes) for bid in problem.bids for curve in _curves(bid)) > MOST_POINTS:
        return None
    trainers = {bid.name: _trainer_document(problem, bid) for bid in problem.bids}
    document: dict[str, Any] = {'horizon_s': problem.horizon_s, 'trainers': list(trainers.values())}
    if any(bid.fixed for bid in problem.bids):
        document['min_rescale_interval_s'] = 1.0
    if problem.blocks:
        document['spans_blocks'] = problem.spans_blocks
        document['blocks'] = blocks = []
        for block in problem.blocks:
            blocks.append({'id': block.name, 'nodes': block.nodes})
            if block.node_class:
                blocks[-1]['node_class'] = block.node_class
            if math.isfinite(block.remaining_s):
                blocks[-1]['remaining_s'] = max(0.0, block.remaining_s)
    else:
        document['nodes'] = problem.nodes
    try:
        for limit in problem.limits:
            _state_limit(limit, problem.nodes, document, trainers)
    except ValueError:
        return None
    return document


def _blocks(stated: ProblemDocument) -> tuple[Block, ...]:
    if stated.blocks is None:
        if stated.nodes is None:
            raise BadInput('the field nodes is missing (or blocks in its place).')
        return ()
    if stated.nodes is not None:
        raise BadInput('both nodes and blocks are given; give one of them.')
    _refuse_twice('blocks', 'id', (block.id for block in stated.blocks))
    return tuple(
        Block(
            b.id, b.nodes, math.inf if b.remaining_s is None else b.remaining_s, b.node_class or ''
        )
        for b in stated.blocks
    )


def _bid(
    stated: ProblemDocument,
    trainer: TrainerDocument,
    blocks: tuple[Block, ...],
    pool: int,
    metric: Metric,
) -> Bid:
    where = f'trainer {trainer.name!r}: '
    low, high = trainer.min_nodes, trainer.max_nodes
    if low > high:
        raise BadInput(f'{where}min_nodes is {low}, above max_nodes, which is {high}.')
    sizes = tuple(sorted(set(trainer.sizes or ())))
    if sizes and not any(low <= n <= high for n in sizes):
        raise BadInput(f'{where}none of sizes is from min_nodes to max_nodes, {low} to {high}.')
    if trainer.share > max((n for n in sizes if n <= high), default=high):
        raise BadInput(f'{where}share is {trainer.share} nodes; it may never have so many.')
    held = _held(stated, trainer, where)
    current = sum(held) if stated.blocks is not None else trainer.current_nodes or 0
    node_classes = list(dict.fromkeys(block.node_class for block in blocks))
    curves = _class_curves(trainer, node_classes, where)
    classes = Counter[str]()
    for count, block in zip(held, blocks, strict=False):
        classes[block.node_class] += count
    mix = tuple((name, count) for name, count in sorted(classes.items()) if count)
    if len(mix) > 1 and not trainer.mixed_parts:
        raise BadInput(
            f'{where}current has nodes of the classes {", ".join(name for name, _ in mix)}; a '
            'trainer without mixed_parts uses one class at a time.'
        )
    if trainer.mixed_parts and not curves:
        raise BadInput(f'{where}mixed_parts needs rates by node class.')
    candidate = Candidate(
        trainer.name,
        curves[0][1] if curves else _curve(trainer, trainer.rate, where),
        low,
        max(min(high, pool), min(current, pool)),
        trainer.priority,
        trainer.deadline_s,
        trainer.remaining_samples,
        _efficiency(trainer, where),
        trainer.waited_s,
        running=Running(
            current,
            mix[0][0] if len(mix) == 1 else '',
            trainer.rescale_up_s,
            trainer.age_s,
            trainer.lost_s,
        )
        if current
        else None,
    )
    costs = (trainer.rescale_up_s, trainer.rescale_down_s)
    since_s = math.inf if trainer.since_rescale_s is None else trainer.since_rescale_s
    return Bid(
        trainer.name,
        low,
        high,
        current,
        *((0.0, 0.0) if metric in CHARGES_RESTARTS else costs),
        metric(candidate),
        held if len(blocks) > 1 else (),
        sizes,
        fixed=since_s < stated.min_rescale_interval_s and current > 0,
        shortest_s=trainer.shortest_s,
        class_curves=by_class(metric, candidate, curves),
        current_class=mix[0][0] if len(mix) == 1 else '',
        mixed_parts=trainer.mixed_parts,
        current_mix=mix if trainer.mixed_parts else (),
    )


def _class_curves(
    trainer: TrainerDocument, node_classes: Sequence[str], where: str
) -> list[tuple[str, ScalingCurve]]:
    if (trainer.rate is None) == (trainer.rates is None):
        raise BadInput(f'{where}give either rate, or rates by node class.')
    for name in trainer.rates or {}:
        if name not in node_classes:
            known = ', '.join(map(repr, filter(None, node_classes))) or 'no node_class'
            raise BadInput(
                f'{where}rates has the node class {name!r}, which no block has; the blocks have '
                f'{known}.'
            )
    return [(name, _curve(trainer, rate, where)) for name, rate in (trainer.rates or {}).items()]


def _curve(trainer: TrainerDocument, rate: list[float] | None, where: str) -> ScalingCurve:
    points = _points(trainer.nodes, rate or [], 'nodes', 'rate', where)
    first = min(points)
    if points.get(0, 0.0) != 0.0:
        raise BadInput(f'{where}rate is {points[0]:g} at 0 nodes; it must be 0 there.')
    if first > max(trainer.min_nodes, 1):
        raise BadInput(
            f'{where}nodes starts at {first}, above min_nodes, which is {trainer.min_nodes}; '
            f'the rate must be known from min_nodes on.'
        )
    return ScalingCurve.from_points(points)


def _efficiency(trainer: TrainerDocument, where: str) -> Efficiency | None:
    given = trainer.efficiency
    if given is None:
        return None
    points = _points(given.nodes, given.value, 'efficiency.nodes', 'efficiency.value', where)
    return Efficiency(tuple(sorted(points)), tuple(value for _, value in sorted(points.items())))


def _points(
    nodes: list[int], values: list[float], first: str, second: str, where: str
) -> dict[int, float]:
    if len(nodes) != len(values):
        raise BadInput(
            f'{where}{first} has {len(nodes)} entries and {second} {len(values)}; they go in pairs.'
        )
    for count, times in Counter(nodes).items():
        if times > 1:
            raise BadInput(
                f'{where}{first} has {count} {times} times; each count may be there once.'
            )
    return dict(zip(nodes, values, strict=True))


def _held(stated: ProblemDocument, trainer: TrainerDocument, where: str) -> tuple[int, ...]:
    """What a trainer holds in each block; empty where there are no blocks."""
    if stated.blocks is None:
        if trainer.current is not None:
            raise BadInput(f'{where}current is for problems with blocks; give current_nodes.')
        return ()
    if trainer.current_nodes is not None:
        raise BadInput(
            f'{where}current_nodes is for problems without blocks; give current, the '
            'nodes in each block.'
        )
    held = dict(trainer.current or {})
    counts = tuple(held.pop(block.id, 0) for block in stated.blocks)
    if held:
        raise BadInput(
            f'{where}current names the block {next(iter(held))!r}, which is not among the blocks.'
        )
    return counts


def _check_held(
    stated: ProblemDocument, blocks: tuple[Block, ...], pool: int, bids: tuple[Bid, ...]
) -> None:
    """Refuse trainers that hold more nodes than there are, in all or in one block."""
    field = 'current_nodes' if stated.blocks is None else 'current'
    for bid in bids:
        if bid.current_nodes > pool:
            raise BadInput(
                f'trainer {bid.name!r}: {field} is {bid.current_nodes} in all, and the '
                f'pool has {pool} nodes.'
            )
    _check_sum(bids, [bid.current_nodes for bid in bids], pool, field, 'nodes, and the pool has')
    for b, block in enumerate(blocks if len(blocks) > 1 else ()):
        held = [bid.held[b] for bid in bids]
        _check_sum(bids, held, block.nodes, field, f'nodes of block {block.name!r}, which has')


def _check_sum(
    bids: tuple[Bid, ...], held: Sequence[int], most: int, field: str, of_what: str
) -> None:
    taken = 0
    for bid, count in zip(bids, held, strict=True):
        taken += count
        if taken > most:
            raise BadInput(
                f'trainer {bid.name!r}: with its {field} the trainers hold {taken} {of_what} '
                f'{most}.'
            )


def _limits(stated: ProblemDocument, pool: int) -> tuple[Limit, ...]:
    limits = pool_limits(pool, stated.max_nodes, stated.keep_free)
    if stated.budget_node_s is not None:
        limits.append(Limit(node_s=stated.budget_node_s, why='budget'))
    members = members_by_key(stated.trainers)
    limits += owner_limits(
        members,
        _by_key(stated.user_nodes, stated.group_nodes),
        _by_key(stated.user_budget_node_s, stated.group_budget_node_s),
    )
    shares = _by_key(stated.user_shares, stated.group_shares)
    shares |= {f'trainer {t.name}': t.share for t in stated.trainers if t.share}
    return *limits, *(
        Limit(tuple(members[key]), least=share, why=SHARE_OF + key)
        for key, share in shares.items()
        if key in members
    )


def _by_key(users: Mapping[str, T], groups: Mapping[str, T]) -> dict[str, T]:
    return {f'user {name}': value for name, value in users.items()} | {
        f'group {name}': value for name, value in groups.items()
    }


def _refuse_twice(what: str, field: str, names: Iterable[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise BadInput(f'{times} of the {what} have the {field} {name!r}; give each its own.')


def _trainer_document(problem: Problem, bid: Bid) -> dict[str, Any]:
    document: dict[str, Any] = {
        'name': bid.name,
        'min_nodes': bid.min_nodes,
        'max_nodes': bid.max_nodes,
        'rescale_up_s': bid.rescale_up_s,
        'rescale_down_s': bid.rescale_down_s,
    }
    if bid.class_curves:
        document |= _class_document(problem, bid)
    else:
        document |= {'nodes': list(bid.curve.nodes), 'rate': list(bid.curve.rate)}
    if problem.blocks:
        counts = zip(problem.blocks, problem.held(bid), strict=True)
        document['current'] = {block.name: count for block, count in counts if count}
    else:
        document['current_nodes'] = bid.current_nodes
    if bid.mixed_parts and 'rates' in document:
        document['mixed_parts'] = bid.mixed_parts
    if bid.sizes:
        document['sizes'] = list(bid.sizes)
    if problem.barred(bid):
        document['shortest_s'] = bid.shortest_s
    if bid.fixed:
        document['since_rescale_s'] = 0.0
    return document


def _curves(bid: Bid) -> list[ScalingCurve]:
    return [curve for _, curve in bid.class_curves] or [bid.curve]


def _class_document(problem: Problem, bid: Bid) -> dict[str, Any]:
    """Its curves on the classes of the problem, at the points of all of them."""
    here = {name: curve for name, curve in bid.class_curves if name in problem.places_by_class}
    if not here:  # it can use none of the nodes
        return {'nodes': [max(bid.min_nodes, 1)], 'rate': [0.0]}
    nodes = sorted({n for curve in here.values() for n in curve.nodes})
    rates = {name: [curve.rate_at(n) for n in nodes] for name, curve in here.items()}
    return {'nodes': nodes, 'rates': rates}


def _state_limit(
    limit: Limit, pool: int, document: dict[str, Any], trainers: Mapping[str, dict[str, Any]]
) -> None:
    """Add a limit to a document; ValueError if documents cannot state it."""
    kind, _, owner = limit.why.removeprefix(SHARE_OF).partition(' ')
    if limit.members and kind in OWNERS:
        for name in limit.members:
            trainers[name][kind] = owner
        for field, value in (
            ('shares', limit.least or None),
            ('nodes', limit.most),
            ('budget_node_s', limit.node_s),
        ):
            if value is not None:
                document.setdefault(f'{kind}_{field}', {})[owner] = value
    elif limit.members and kind == 'trainer' and limit.most is None and limit.node_s is None:
        trainers[owner]['share'] = limit.least
    elif limit.members or limit.least or limit.most is None or limit.node_s is not None:
        raise ValueError(f'A document cannot state the limit {limit}.')
    elif limit.why == KEPT_FREE:
        document['keep_free'] = pool - limit.most
    else:
        document['max_nodes'] = min(limit.most, document.get('max_nodes', limit.most))
