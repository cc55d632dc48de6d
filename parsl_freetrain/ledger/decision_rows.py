"""The controller's batches of events, its decisions, and the problems that they solve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from parsl_freetrain.core.model.event_json import encode
from parsl_freetrain.core.model.events import Action, Event
from parsl_freetrain.ledger.pending_rows import PendingRows, as_json

PROBLEMS_KEPT = 20
"""Number of newest decisions of a run for which the ledger keeps the whole problem."""


class DecisionRows:
    """The tables ``batches``, ``decisions`` and ``problems`` of one run."""

    def __init__(self, rows: PendingRows) -> None:
        self._rows = rows
        self._batches = 0

    def batch(self, at: float, events: Sequence[Event]) -> None:
        """The events that the controller receives in one call. With its settings, the controller
        decides the same again from them.
        """
        self._batches += 1
        self._rows.insert(
            'batches', {'seq': self._batches, 'at': float(at), 'events': encode(events)}, at
        )

    def decision(
        self,
        *,
        at: float,
        trigger: str,
        nodes: int,
        status: str,
        solver: str,
        objective: float,
        seconds: float,
        staying: float,
        current: Mapping[str, int],
        allocation: Mapping[str, int],
        actions: Sequence[Action],
        bound: float | None = None,
    ) -> None:
        """The allocator's task and answer for the last :meth:`batch`.

        ``staying`` is the objective of leaving the running fragments as they are, ``bound`` an
        upper bound of what any allocation is worth.
        """
        self._rows.insert(
            'decisions',
            {
                'batch': self._batches or None,
                'at': float(at),
                'trigger': str(trigger),
                'nodes': int(nodes),
                'status': str(status),
                'solver': str(solver),
                'objective': _number(objective),
                'bound': bound,
                'staying': _number(staying),
                'seconds': _number(seconds),
                'current': as_json(current),
                'allocation': as_json(allocation),
                'actions': encode(actions),
            },
            at,
        )

    def problem(self, document: Mapping[str, Any]) -> None:
        """The allocator's problem in the last decision; only the newest few of a run are kept."""
        run = self._rows.run()
        self._rows.execute(
            'INSERT INTO problems (run, decision, problem) SELECT ?, max(rowid), ? FROM decisions',
            (run, as_json(document)),
            None,
        )
        self._rows.execute(
            'DELETE FROM problems WHERE run = ? AND rowid NOT IN '
            '(SELECT rowid FROM problems WHERE run = ? ORDER BY rowid DESC LIMIT ?)',
            (run, run, PROBLEMS_KEPT),
            None,
        )


def _number(value: float) -> float:
    # SQLite stores NaN as NULL, which a NOT NULL column refuses.
    return -math.inf if math.isnan(value) else float(value)
