"""The budgets and minimum shares of a run, and what they have come to."""

from __future__ import annotations

from dataclasses import dataclass

from parsl_freetrain.core.allocation.constraints import EVERYBODY
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import RunHistory, RunRow
from parsl_freetrain.ledger.usage import owners_in, used_until


@dataclass(frozen=True)
class LimitNow:
    """A budget (``limit`` and ``used`` in node-seconds, earlier runs of the ledger included) or a
    minimum share (nodes). ``whose``: 'trainer NAME', 'user NAME', 'group NAME' or 'total'.
    """

    kind: str
    whose: str
    limit: float
    used: float


def limits_of(
    reader: Reader, history: RunHistory, run: RunRow, now: float, going: bool
) -> tuple[LimitNow, ...]:
    """The limits of a run at ``now`` (epoch seconds), ``going``: while it goes on."""
    settings = None if run.settings is None else run.settings.controller
    if settings is None or not (settings.budgets or settings.min_shares):
        return ()
    used = used_until(reader, history, run, now if going else None)
    owners = owners_in(reader, run) if settings.min_shares else {}
    nodes: dict[str, int] = {}
    for fragment in history.fragments:
        if going and fragment.run == run.id and fragment.ended_at is None:
            for key in owners.get(fragment.trainer, ()):
                nodes[key] = nodes.get(key, 0) + len(fragment.nodes)
    return (
        *(
            LimitNow('budget', key, limit, used.get(key, 0.0))
            for key, limit in settings.budgets.items()
        ),
        *(
            LimitNow('minimum share', key, least, nodes.get(key, 0))
            for key, least in settings.min_shares.items()
        ),
    )


def in_words(limit: LimitNow) -> str:
    """One line about a limit."""
    whose = 'all trainers' if limit.whose == EVERYBODY else limit.whose
    if limit.kind == 'budget':
        spent = ', spent' if limit.used >= limit.limit else ''
        return f'budget of {whose}: {limit.used:,.0f} of {limit.limit:,.0f} node-seconds{spent}'
    return f'minimum share of {whose}: {limit.limit:.0f} nodes, has {limit.used:.0f}'
