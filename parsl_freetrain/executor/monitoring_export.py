"""Copies a run's journal into the database file of Parsl's monitoring."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.journal.tables import write_sqlite

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
PREFIX = 'freetrain_'
MOST_OF_THE_TIME = 0.05
"""Maximum share of the time in which this copies."""


def database_of(endpoint: str | None) -> Path | None:
    """The file of a monitoring endpoint such as ``sqlite:///runinfo/monitoring.db``, or None."""
    if endpoint is None or not endpoint.startswith('sqlite:///'):
        return None
    return Path(endpoint.removeprefix('sqlite:///')).absolute()


class MonitoringExport:
    """Copies one run into tables ``freetrain_trainers``, ``freetrain_fragments`` and so on,
    periodically and at the end. Their ``run_id`` and a fragment's ``task_id`` are Parsl's.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._over = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, endpoint: str | None, ledger: Path, run: str) -> None:
        """Start copying Parsl's ``run``, unless it has begun or the endpoint is no SQLite file."""
        database = database_of(endpoint)
        with self._starting:
            if database is None or self._thread is not None:
                return
            name, work = 'FreeTrain-MonitoringExport', (database, ledger, run)
            self._thread = threading.Thread(target=self._work, args=work, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self, database: Path, ledger: Path, run: str) -> None:
        complained = over = False
        wait_s, journal = self._period_s, None
        while not over:
            over = self._over.wait(wait_s)
            began = time.monotonic()
            try:
                journal = journal or Journal(ledger)
                write_sqlite(journal.history(run), database, PREFIX)
                complained = False
            except (sqlite3.Error, BadInput) as error:
                # Parsl may write for a long time; no training depends on this copy.
                if not complained:
                    logger.warning(
                        'The ledger %s could not be copied into %s: %s', ledger, database, error
                    )
                complained = True
            wait_s = max(self._period_s, (time.monotonic() - began) / MOST_OF_THE_TIME)
