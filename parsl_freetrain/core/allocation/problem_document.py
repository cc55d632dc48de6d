"""An allocation problem as users state it to ``freetrain allocate``, and what is wrong with it."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar

from msgspec import Meta, field

from parsl_freetrain.core.allocation import constraints, objectives
from parsl_freetrain.core.allocation.problem import Bid, Capacity, Limit, Problem
from parsl_freetrain.core.model.checked_settings import Settings, read_settings
from parsl_freetrain.core.model.checked_values import Share
from parsl_freetrain.core.model.errors import BadInput, shown
from parsl_freetrain.core.model.types import Efficiency, ScalingCurve

T = TypeVar('T')

MOST_NODES = 1_000_000  # the largest pool that a document may state

# Bounds keep sums of products finite and exact enough.
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Count = Annotated[int, Meta(ge=0, le=10**15)]
AtLeast1 = Annotated[int, Meta(ge=1, le=10**15)]
PoolSize = Annotated[int, Meta(ge=0, le=MOST_NODES)]
Name = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=500,
        pattern=r'^[^\ud800-\udfff]*\Z',
        description='a text of 1 to 500 characters',
    ),
]


class EfficiencyDocument(Settings, frozen=True, kw_only=True):
    nodes: Annotated[tuple[AtLeast1, ...], Meta(min_length=1)]
    value: tuple[Share, ...]


class TrainerDocument(Settings, frozen=True, kw_only=True):
    name: Name
    min_nodes: Count
    max_nodes: AtLeast1
    current_nodes: Count | None = None
    current: dict[str, Count] | None = None
    rescale_up_s: Seconds
    rescale_down_s: Seconds
    nodes: Annotated[tuple[Count, ...], Meta(min_length=1)]
    rate: tuple[Amount, ...] | None = None
    rates: Annotated[dict[Name, tuple[Amount, ...]], Meta(min_length=1)] | None = None
    priority: Amount = 1.0
    deadline_s: Annotated[float, Meta(ge=-1e9, le=1e9)] | None = None
    remaining_samples: Annotated[float, Meta(gt=0, le=1e18)] | None = None
    efficiency: EfficiencyDocument | None = None
    waited_s: Seconds = 0.0
    age_s: Seconds = 0.0
    lost_s: Seconds = 0.0
    sizes: Annotated[tuple[AtLeast1, ...], Meta(min_length=1)] | None = None
    share: Count = 0
    user: Name | None = None
    group: Name | None = None
    since_rescale_s: Seconds | None = None
    shortest_s: Seconds = 0.0
    mixed_parts: Count = 0


class BlockDocument(Settings, frozen=True, kw_only=True):
    id: Name
    nodes: PoolSize
    remaining_s: Seconds | None = None
    node_class: Name | None = None


class ProblemDocument(Settings, frozen=True, kw_only=True):
    id: str | int | None = None
    horizon_s: Positive
    nodes: PoolSize | None = None
    blocks: tuple[BlockDocument, ...] | None = None
    trainers: tuple[TrainerDocument, ...]
    objective: str | None = None
    spans_blocks: bool = True
    max_nodes: Count | None = None
    keep_free: Count = 0
    user_nodes: dict[str, Count] = field(default_factory=dict)
    group_nodes: dict[str, Count] = field(default_factory=dict)
    user_shares: dict[str, Count] = field(default_factory=dict)
    group_shares: dict[str, Count] = field(default_factory=dict)
    budget_node_s: Amount | None = None
    user_budget_node_s: dict[str, Amount] = field(default_factory=dict)
    group_budget_node_s: dict[str, Amount] = field(default_factory=dict)
    min_rescale_interval_s: Seconds = 0.0


def decode(text: str) -> dict[str, Any]:
    """The fields of a JSON object, unchecked. Raises BadInput if the text is no such object."""
    try:
        raw = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once_each)
    except BadInput:
        raise
    except json.JSONDecodeError as error:
        raise BadInput(f'it is not JSON: {error.msg} at column {error.colno}.') from None
    except ValueError:
        raise BadInput('it has a number with too many digits.') from None
    except RecursionError:
        raise BadInput('it is nested too deeply.') from None
    if not isinstance(raw, dict):
        raise BadInput(f'a problem is a JSON object, {shown(raw)} is not.')
    return raw


def _refuse_constant(name: str) -> NoReturn:
    raise BadInput(f'{name} is not a number in JSON.')


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadInput(f'an object has the field {twice!r} twice.')
    return fields


def check(raw: dict[str, Any]) -> ProblemDocument:
    """The document; raises BadInput, with the trainer and the field that cannot be used."""
    return read_settings(ProblemDocument, '', raw)


def problem_of(stated: ProblemDocument, objective: objectives.Metric | None = None) -> Problem:
    """The problem that a document states; ``objective``: in place of its own. Raises BadInput."""
    stated_name = 'throughput' if stated.objective is None else stated.objective
    metric = objective or objectives.objective_named(stated_name)
    blocks = _blocks(stated)
    pool = sum(block.nodes for block in blocks) if stated.blocks is not None else stated.nodes or 0
    _refuse_twice('trainers', 'name', (trainer.name for trainer in stated.trainers))
    if pool > MOST_NODES:
        raise BadInput(f'the blocks have {pool} nodes; the most is {MOST_NODES}.')
    bids = tuple(_bid(stated, trainer, blocks, pool, metric) for trainer in stated.trainers)
    _check_held(stated, blocks, pool, bids)
    return Problem(stated.horizon_s, pool, bids, blocks, stated.spans_blocks, _limits(stated, pool))


def _blocks(stated: ProblemDocument) -> tuple[Capacity, ...]:
    if stated.blocks is None:
        if stated.nodes is None:
            raise BadInput('the field nodes is missing (or blocks in its place).')
        return ()
    if stated.nodes is not None:
        raise BadInput('both nodes and blocks are given; give one of them.')
    _refuse_twice('blocks', 'id', (block.id for block in stated.blocks))
    ends = (math.inf if b.remaining_s is None else b.remaining_s for b in stated.blocks)
    each = zip(stated.blocks, ends, strict=True)
    return tuple(Capacity(b.id, b.nodes, end, b.node_class or '') for b, end in each)


def _bid(
    stated: ProblemDocument,
    trainer: TrainerDocument,
    blocks: tuple[Capacity, ...],
    pool: int,
    metric: objectives.Metric,
) -> Bid:
    where = f'trainer {trainer.name!r}: '
    sizes = _sizes(trainer, where)
    held = _held(stated, trainer, where)
    current = sum(held) if stated.blocks is not None else trainer.current_nodes or 0
    curves = _class_curves(trainer, blocks, where)
    mix = _mix(trainer, blocks, held, where)
    only_class = mix[0][0] if len(mix) == 1 else ''
    costs = (trainer.rescale_up_s, trainer.rescale_down_s)
    candidate = objectives.Candidate(
        trainer.name,
        curves[0][1] if curves else _curve(trainer, trainer.rate, where),
        trainer.min_nodes,
        max(min(trainer.max_nodes, pool), min(current, pool)),
        trainer.priority,
        trainer.deadline_s,
        trainer.remaining_samples,
        _efficiency(trainer, where),
        trainer.waited_s,
        running=objectives.Running(current, only_class, costs[0], trainer.age_s, trainer.lost_s)
        if current
        else None,
    )
    since_s = math.inf if trainer.since_rescale_s is None else trainer.since_rescale_s
    return Bid(
        trainer.name,
        trainer.min_nodes,
        trainer.max_nodes,
        current,
        *((0.0, 0.0) if metric in objectives.CHARGES_RESTARTS else costs),
        metric(candidate),
        held if len(blocks) > 1 else (),
        sizes,
        fixed=since_s < stated.min_rescale_interval_s and current > 0,
        shortest_s=trainer.shortest_s,
        class_curves=objectives.by_class(metric, candidate, curves),
        current_class=only_class,
        mixed_parts=trainer.mixed_parts,
        current_mix=mix if trainer.mixed_parts else (),
    )


def _sizes(trainer: TrainerDocument, where: str) -> tuple[int, ...]:
    low, high = trainer.min_nodes, trainer.max_nodes
    if low > high:
        raise BadInput(f'{where}min_nodes is {low}, above max_nodes, which is {high}.')
    sizes = tuple(sorted(set(trainer.sizes or ())))
    if sizes and not any(low <= n <= high for n in sizes):
        raise BadInput(f'{where}none of sizes is from min_nodes to max_nodes, {low} to {high}.')
    if trainer.share > max((n for n in sizes if n <= high), default=high):
        raise BadInput(f'{where}share is {trainer.share} nodes; it may never have so many.')
    return sizes


def _mix(
    trainer: TrainerDocument, blocks: tuple[Capacity, ...], held: tuple[int, ...], where: str
) -> tuple[tuple[str, int], ...]:
    classes = Counter[str]()
    for count, block in zip(held, blocks, strict=False):
        classes[block.node_class] += count
    mix = tuple((name, count) for name, count in sorted(classes.items()) if count)
    if len(mix) > 1 and not trainer.mixed_parts:
        raise BadInput(
            f'{where}current has nodes of the classes {", ".join(name for name, _ in mix)}; a '
            'trainer without mixed_parts uses one class at a time.'
        )
    if trainer.mixed_parts and not trainer.rates:
        raise BadInput(f'{where}mixed_parts needs rates by node class.')
    return mix


def _class_curves(
    trainer: TrainerDocument, blocks: tuple[Capacity, ...], where: str
) -> list[tuple[str, ScalingCurve]]:
    node_classes = list(dict.fromkeys(block.node_class for block in blocks))
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


def _curve(trainer: TrainerDocument, rate: Sequence[float] | None, where: str) -> ScalingCurve:
    points = _points(trainer.nodes, rate or (), 'nodes', 'rate', where)
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
    nodes: Sequence[int], values: Sequence[float], first: str, second: str, where: str
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
        raise BadInput(f'{where}current names the block {next(iter(held))!r}, which is not there.')
    return counts


def _check_held(
    stated: ProblemDocument, blocks: tuple[Capacity, ...], pool: int, bids: tuple[Bid, ...]
) -> None:
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
    limits = constraints.pool_limits(pool, stated.max_nodes, stated.keep_free)
    if stated.budget_node_s is not None:
        limits.append(Limit(node_s=stated.budget_node_s, why='budget'))
    members = constraints.members_by_key(stated.trainers)
    most = _by_key(stated.user_nodes, stated.group_nodes)
    node_s = _by_key(stated.user_budget_node_s, stated.group_budget_node_s)
    limits += constraints.owner_limits(members, most, node_s)
    shares = _by_key(stated.user_shares, stated.group_shares)
    shares |= {f'trainer {t.name}': t.share for t in stated.trainers if t.share}
    return *limits, *(
        Limit(tuple(members[key]), least=share, why=constraints.SHARE_OF + key)
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
