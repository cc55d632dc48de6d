"""What runs have used of the budgets of users, groups and trainers."""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain.core.allocation.constraints import keys_of
from parsl_freetrain.core.model.events import TrainerSubmitted
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import RunHistory, RunRow


def used_node_s(ledger: Path) -> dict[str, float]:
    """Node-seconds used in all runs of a ledger, by the keys of budgets; empty without a ledger.

    A fragment counts from the decision that started it until its end, or until its run was last
    heard of, with all of its nodes.

    Raises
    ------
    BadInput
        If the file is no ledger.
    """
    if not ledger.exists():
        return {}
    with Reader(ledger) as reader:
        story = reader.story()
        return used_until(reader, story, story.runs[-1], None) if story.runs else {}


def used_until(
    reader: Reader, story: RunHistory, last: RunRow, now: float | None
) -> dict[str, float]:
    """The same up to a run, whose running fragments count until ``now`` (epoch seconds); None: they
    count until the run was last heard of.
    """
    used: dict[str, float] = {}
    for run in story.runs:
        if run.id > last.id:
            break
        owners = owners_in(reader, run)
        until = now if now is not None and run.id == last.id else run.last_at
        for fragment in story.fragments:
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
