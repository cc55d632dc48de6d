"""The budgets and minimum shares of a run, and what they have come to."""

from __future__ import annotations

from dataclasses import dataclass

from parsl_freetrain.core.allocation.constraints import EVERYBODY
from parsl_freetrain.core.controller.settings import DecisionSettings
from parsl_freetrain.core.model.state import History, RunState
from parsl_freetrain.journal.usage import owners_in, used_until


@dataclass(frozen=True)
class LimitNow:
    """A budget (``limit`` and ``used`` in node-seconds, earlier runs of the ledger included) or a
    minimum share (nodes). ``whose``: 'trainer NAME', 'user NAME', 'group NAME' or 'total'.
    """

    kind: str
    whose: str
    limit: float
    used: float


def limits_of(history: History, run: RunState, now: float, going: bool) -> tuple[LimitNow, ...]:
    """The limits of a run at ``now`` (epoch seconds), ``going``: while it goes on."""
    decides = DecisionSettings.of(run.began)
    if decides is None:
        return ()
    settings, owners = decides.controller, owners_in(run)
    used = used_until(history, run, now if going else None) if settings.budgets else {}
    nodes: dict[str, int] = {}
    for fragment in run.fragments.values():
        if going and fragment.ended is None:
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
