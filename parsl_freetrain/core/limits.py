"""Side constraints of an allocation, from what administrators say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parsl_freetrain.core.allocation import Limit
from parsl_freetrain.core.errors import BadInput

OWNERS = ('user', 'group')


def pool_limits(pool: int, max_nodes: int | None, keep_free: int) -> list[Limit]:
    """What holds for all trainers together.

    Parameters
    ----------
    pool
        Nodes that there are.
    max_nodes
        So many are used at once, at most; None: all.
    keep_free
        So many are left idle.
    """
    limits = [Limit(most=max_nodes, why='max_nodes')] if max_nodes is not None else []
    return limits + ([Limit(most=max(pool - keep_free, 0), why='nodes kept free')] if keep_free else [])


def owner_limits(what: str, owners: Iterable[tuple[str, str | None]], most: Mapping[str, int],
                 node_s: Mapping[str, float] | None = None) -> list[Limit]:
    """What holds for the trainers of one owner: a limit for each who has any, as one without would hold for all of them.

    Parameters
    ----------
    what
        One of :data:`OWNERS`.
    owners
        Trainers and whose they are; nobody's: None or an empty name.
    most, node_s
        By owner: nodes at once, and node-seconds within the horizon.
    """
    members: dict[str, list[str]] = {}
    for name, owner in owners:
        if owner:
            members.setdefault(owner, []).append(name)
    budgets = node_s or {}
    return [Limit(tuple(members[owner]), most=most.get(owner), node_s=budgets.get(owner), why=f'{what} {owner}')
            for owner in dict.fromkeys((*most, *budgets)) if owner in members]


def caps_by_owner(caps: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Caps such as ``{'user anna': 8, 'group physics': 64}``, in nodes, for each of :data:`OWNERS`.

    Raises
    ------
    BadInput
        If one is about something else, or below 0.
    """
    found: dict[str, dict[str, int]] = {what: {} for what in OWNERS}
    for key, most in caps.items():
        what, _, owner = key.partition(' ')
        if what not in OWNERS or not owner:
            raise BadInput(f"The cap {key!r} is about nobody; write 'user NAME' or 'group NAME', with a space in between.")
        if most < 0:
            raise BadInput(f'The cap of {key} is {most} nodes; it must be 0 or more.')
        found[what][owner] = most
    return found
