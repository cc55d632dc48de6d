"""What runs have used of the budgets of users, groups and trainers, and what they were charged."""

from __future__ import annotations

import math
from pathlib import Path

from parsl_freetrain.core.allocation.constraints import keys_of
from parsl_freetrain.core.controller.charges import Charges
from parsl_freetrain.core.model.events import (
    BlockClosed,
    BlockOpened,
    BlockRequeued,
    BlockStarted,
    TrainerSubmitted,
)
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import RunHistory, RunRow


def used_node_s(ledger: Path) -> dict[str, float]:
    """Node-seconds used in all runs of a ledger, by the keys of budgets; empty without a ledger.

    A fragment counts from the decision that started it until its end, or until its run was last
    heard of, with all of its nodes. Raises BadInput if the file is no ledger.
    """
    if not ledger.exists():
        return {}
    with Reader(ledger) as reader:
        history = reader.history()
        return used_until(reader, history, history.runs[-1], None) if history.runs else {}


def used_until(
    reader: Reader, history: RunHistory, last: RunRow, now: float | None
) -> dict[str, float]:
    """The same up to a run, whose running fragments count until ``now`` (epoch seconds); None: they
    count until the run was last heard of.
    """
    used: dict[str, float] = {}
    for run in history.runs:
        if run.id > last.id:
            break
        owners = owners_in(reader, run)
        until = now if now is not None and run.id == last.id else run.last_at
        for fragment in history.fragments:
            if fragment.run == run.id:
                end = until if fragment.ended_at is None else fragment.ended_at
                node_s = len(fragment.nodes) * max(end - fragment.decided_at, 0.0)
                for key in owners.get(fragment.trainer, ()):
                    used[key] = used.get(key, 0.0) + node_s
    return used


def owners_in(reader: Reader, run: RunRow) -> dict[str, tuple[str, ...]]:
    """By trainer of a run, the keys of the budgets and shares that it counts for."""
    return {
        event.trainer.name: tuple(keys_of(event.trainer))
        for batch in reader.batches(run)
        for event in batch.events
        if isinstance(event, TrainerSubmitted)
    }


def charged(ledger: Path) -> float:
    """What all runs of a ledger were charged for blocks, at most; 0 without a ledger.

    A block whose end is not known counts with all that it can cost. Raises BadInput if the file is
    no ledger.
    """
    charges = Charges(None, 0.0)
    if not ledger.exists():
        return 0.0
    with Reader(ledger) as reader:
        for run in reader.history().runs:
            requests: dict[str, BlockRequest] = {}
            begun: dict[str, float] = {}
            for batch in reader.batches(run):
                for event in batch.events:
                    match event:
                        case BlockOpened():
                            requests[event.block] = event.request
                        case BlockStarted():
                            begun[event.block] = event.since_s
                        case BlockRequeued() if event.block in requests:
                            since_s = begun.pop(event.block, None)
                            charges.ended(requests[event.block], since_s, event.at)
                        case BlockClosed() if event.block in requests:
                            since_s = begun.pop(event.block, None)
                            charges.ended(requests.pop(event.block), since_s, event.at)
            for block in requests.values():
                charges.ended(block, -math.inf, 0.0)
    return charges.charged
