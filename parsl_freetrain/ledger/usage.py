"""What earlier runs have used of the budgets of users, groups and trainers."""

from __future__ import annotations

from pathlib import Path

from parsl_freetrain.core.allocation.constraints import keys_of
from parsl_freetrain.core.model.events import TrainerSubmitted
from parsl_freetrain.ledger.reader import Reader


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
    used: dict[str, float] = {}
    with Reader(ledger) as reader:
        story = reader.story()
        for run in story.runs:
            owners = {
                event.trainer.name: keys_of(event.trainer)
                for batch in reader.batches(run)
                for event in batch.events
                if isinstance(event, TrainerSubmitted)
            }
            for fragment in story.fragments:
                if fragment.run == run.id:
                    end = run.last_at if fragment.ended_at is None else fragment.ended_at
                    node_s = len(fragment.nodes) * max(end - fragment.decided_at, 0.0)
                    for key in owners.get(fragment.trainer, ()):
                        used[key] = used.get(key, 0.0) + node_s
    return used
