"""Copies the ledger's rows of a run into the database file of Parsl's monitoring."""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
BUSY_S = 5.0

CHANGING = ('trainers', 'blocks', 'nodes', 'fragments')
GROWING = ('decisions', 'checkpoints', 'progress')
"""Tables of the ledger that only grow. Their new rows are copied; those of ``CHANGING`` are copied
completely.
"""


def database_of(endpoint: str | None) -> Path | None:
    """The file of a monitoring endpoint such as ``sqlite:///runinfo/monitoring.db``; None for any
    other endpoint.
    """
    if endpoint is None or not endpoint.startswith('sqlite:///'):
        return None
    return Path(endpoint.removeprefix('sqlite:///')).absolute()


class MonitoringExport:
    """Copies one run's rows into tables ``freetrain_trainers``, ``freetrain_fragments`` and so on,
    periodically and at the end.

    The tables have the ledger's columns and ``run_id``, which is Parsl's. A fragment's ``task_id``
    is also Parsl's.
    """

    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._over = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, endpoint: str | None, ledger: Path, run: str) -> None:
        """Start copying, unless it has started already or the endpoint is not an SQLite file.
        ``run`` is Parsl's id of the run.
        """
        database = database_of(endpoint)
        with self._starting:
            if database is None or self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._work,
                args=(database, ledger, run),
                name='FreeTrain-MonitoringExport',
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        """Copy a last time, when the ledger is complete, and end."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self, database: Path, ledger: Path, run: str) -> None:
        complained = over = False
        while not over:
            over = self._over.wait(self._period_s)
            try:
                copy(database, ledger, run)
                complained = False
            except sqlite3.Error as error:
                # Parsl may write for a long time; no training depends on this copy.
                if not complained:
                    logger.warning(
                        'The ledger %s could not be copied into %s: %s', ledger, database, error
                    )
                complained = True


def copy(database: Path, ledger: Path, run: str) -> None:
    """Update the tables in ``database`` in one transaction.

    Raises
    ------
    sqlite3.Error
        If one of the files cannot be used now.
    """
    with closing(
        sqlite3.connect(
            f'file:{quote(str(database))}', uri=True, timeout=BUSY_S, isolation_level=None
        )
    ) as connection:
        connection.execute('ATTACH ? AS ledger', (f'file:{quote(str(ledger.absolute()))}?mode=ro',))
        found = connection.execute('SELECT id FROM ledger.runs WHERE name = ?', (run,)).fetchone()
        if found is None:
            return
        connection.execute('BEGIN IMMEDIATE')
        for table in (*CHANGING, *GROWING):
            _copy(connection, table, run, found[0])
        connection.execute('COMMIT')


def _copy(connection: sqlite3.Connection, table: str, run: str, number: int) -> None:
    mine = f'freetrain_{table}'
    rows = f'SELECT ? AS run_id, rowid AS ledger_row, * FROM ledger.{table} WHERE run = ?'  # noqa: S608
    connection.execute(f'CREATE TABLE IF NOT EXISTS main.{mine} AS {rows}', (run, -1))
    last = 0
    if table in CHANGING:
        connection.execute(f'DELETE FROM main.{mine} WHERE run_id = ?', (run,))  # noqa: S608
    else:
        last = connection.execute(
            f'SELECT coalesce(max(ledger_row), 0) FROM main.{mine} WHERE run_id = ?',  # noqa: S608
            (run,),
        ).fetchone()[0]
    connection.execute(f'INSERT INTO main.{mine} {rows} AND rowid > ?', (run, number, last))
