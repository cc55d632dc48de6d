"""Limits on what trainers hold together: caps, minimum shares and budgets of users and groups,
stated by a kind of owner and a name: ``{'user anna': 8, 'group physics': 64}``.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from parsl_freetrain.core.allocation.problem import Limit
from parsl_freetrain.core.model.errors import BadInput

OWNERS = ('user', 'group')
EVERYBODY = 'total'  # the key of a budget that holds for all trainers together
SHARE_OF = 'share of '  # what the ``why`` of a minimum share begins with; its key follows
KEPT_FREE = 'nodes kept free'


class Owned(Protocol):
    """The part of a trainer that limits need. An empty name or None: it has no owner."""

    @property
    def name(self) -> str: ...
    @property
    def user(self) -> str | None: ...
    @property
    def group(self) -> str | None: ...


def keys_of(trainer: Owned) -> tuple[str, ...]:
    owners = [f'{kind} {owner}' for kind in OWNERS if (owner := getattr(trainer, kind))]
    return (EVERYBODY, f'trainer {trainer.name}', *owners)


def members_by_key(trainers: Iterable[Owned]) -> dict[str, list[str]]:
    """The names of the trainers for which the limits under each key hold."""
    members: dict[str, list[str]] = {}
    for trainer in trainers:
        for key in keys_of(trainer):
            members.setdefault(key, []).append(trainer.name)
    return members


def check_keys(
    values: Mapping[str, float], what: str, unit: str, kinds: Collection[str] = OWNERS
) -> None:
    """Raise BadInput unless all keys name owners of these kinds, and values are 0 or more."""
    for key, value in values.items():
        kind, _, owner = key.partition(' ')
        if kind not in kinds or (not owner) != (kind == EVERYBODY):
            allowed = [repr(k if k == EVERYBODY else f'{k} NAME') for k in kinds]
            raise BadInput(
                f'The {what} {key!r} names no user, group or trainer; write '
                f'{", ".join(allowed[:-1])} or {allowed[-1]}, with a space before the name.'
            )
        if not 0 <= value < math.inf:
            raise BadInput(f'The {what} of {key} is {value} {unit}; it must be 0 or more.')


def pool_limits(pool: int, max_nodes: int | None, keep_free: int) -> list[Limit]:
    limits = [Limit(most=max_nodes, why='max_nodes')] if max_nodes is not None else []
    return limits + ([Limit(most=max(pool - keep_free, 0), why=KEPT_FREE)] if keep_free else [])


def owner_limits(
    members: Mapping[str, Sequence[str]],
    most: Mapping[str, int],
    node_s: Mapping[str, float] | None = None,
) -> list[Limit]:
    """Caps (nodes at once) and budgets (node-seconds within the horizon) of owners here."""
    budgets = node_s or {}
    keys = [key for key in dict.fromkeys((*most, *budgets)) if key in members]
    return [Limit(tuple(members[key]), 0, most.get(key), budgets.get(key), key) for key in keys]


def share_limits(
    members: Mapping[str, Sequence[str]],
    shares: Mapping[str, int],
    counts: Mapping[str, Sequence[int]],
    nodes: int,
) -> list[Limit]:
    """Minimum shares, in order, as far as trainers can use them and ``nodes`` suffice."""
    limits, left = [], nodes
    for key, share in shares.items():
        if key not in members:
            continue
        sums = reachable_sums([counts[name] for name in members[key]], left)
        enough = sums >> share
        if enough:
            least, used = share, share + (enough & -enough).bit_length() - 1
        else:
            least = used = sums.bit_length() - 1
        left -= used
        if least:
            limits.append(Limit(tuple(members[key]), least=least, why=SHARE_OF + key))
    return limits


def reachable_sums(counts: Iterable[Sequence[int]], most: int) -> int:
    """Bit n is set if trainers can hold n nodes, up to ``most``: each none or one of its counts."""
    sums = 1
    for of_one in counts:
        more = 0
        if isinstance(of_one, range) and of_one:  # all shifts of a range, in steps that double
            more, width = sums << of_one[0], 1
            while width < len(of_one):
                step = min(width, len(of_one) - width)
                more |= more << step
                width += step
        else:
            for count in of_one:
                more |= sums << count
        sums = (sums | more) & ((2 << max(most, 0)) - 1)
    return sums
