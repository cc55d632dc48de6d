"""What runs have used of the budgets of users, groups and trainers, and what they were charged."""

import math
from pathlib import Path

from parsl_freetrain.core.allocation.constraints import keys_of
from parsl_freetrain.core.controller.budgets import Charges
from parsl_freetrain.core.model.state import History, RunState
from parsl_freetrain.journal.read import Journal


def used_node_s(ledger: Path) -> dict[str, float]:
    """Node-seconds of all runs by budget key; fragments count from decision to last sign."""
    if not ledger.exists():
        return {}
    history = Journal(ledger, keep_progress=False).history()
    return used_until(history, history.runs[-1], None) if history.runs else {}


def used_until(history: History, last: RunState, now: float | None) -> dict[str, float]:
    """The same up to a run, whose running fragments count until ``now``, or its last sign."""
    used: dict[str, float] = {}
    for run in history.runs:
        if run.id > last.id:
            break
        owners = owners_in(run)
        until = now if now is not None and run.id == last.id else run.last_at
        for fragment in run.fragments.values():
            end = until if fragment.ended_at is None else fragment.ended_at
            node_s = len(fragment.nodes) * max(end - fragment.launched.at, 0.0)
            for key in owners.get(fragment.trainer, ()):
                used[key] = used.get(key, 0.0) + node_s
    return used


def owners_in(run: RunState) -> dict[str, tuple[str, ...]]:
    """By trainer of a run, the keys of the budgets and shares that it counts for."""
    return {name: tuple(keys_of(one.trainer)) for name, one in run.trainers.items()}


def charged(ledger: Path) -> float:
    """The most that all runs of a ledger were charged for blocks; open ones count in full."""
    charges = Charges(None, 0.0)
    if not ledger.exists():
        return 0.0
    for block in Journal(ledger, keep_progress=False).history().blocks:
        request = block.opened.request
        for begun, end in block.used:
            charges.ended(request, begun, end)
        begun = -math.inf if block.closed_at is None else block.begun
        charges.ended(request, begun, block.closed_at or 0.0)
    return charges.charged
