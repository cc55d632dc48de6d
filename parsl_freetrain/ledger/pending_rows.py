"""Rows that wait to be written into a ledger, and the transaction that writes them."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsl_freetrain.ledger.connection import Transaction

log = logging.getLogger(__name__)

Value = str | int | float | None

ALIVE_S = 30.0
"""Seconds after which a run that has nothing to write notes that it is alive."""


class PendingRows:
    """Statements of one run, kept in memory until :meth:`commit`.

    One thread calls all methods; another may take over when that one has ended, or by beginning a
    run.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._pending: list[tuple[str, tuple[Value, ...]]] = []
        self._owner: threading.Thread | None = None
        self._run: int | None = None
        self._last_at = self._written_at = -math.inf
        self._complained = False

    @property
    def has_run(self) -> bool:
        return self._run is not None

    def begin(self, run: int, at: float) -> None:
        """Write rows of run number ``run`` from now on."""
        self._run = run
        self._last_at = self._written_at = at
        self._owner = None

    def end(self) -> None:
        """Accept no more rows."""
        self._run = None

    def insert(
        self, table: str, values: Mapping[str, Value], at: float | None, *, replace: bool = False
    ) -> None:
        """Add a row of this run; ``at``: when it happened, None where no time belongs to it."""
        columns = ', '.join(f'"{column}"' for column in ('run', *values))
        marks = ', '.join('?' * (1 + len(values)))
        self.execute(
            f'INSERT {"OR REPLACE " if replace else ""}INTO {table} ({columns}) VALUES ({marks})',  # noqa: S608
            (self.run(), *values.values()),
            at,
        )

    def update(
        self, table: str, key: Mapping[str, Value], values: Mapping[str, Value], at: float | None
    ) -> None:
        """Change the columns ``values`` of this run's row with ``key``."""
        changes = ', '.join(f'"{column}" = ?' for column in values)
        matches = ' AND '.join(f'"{column}" = ?' for column in ('run', *key))
        self.execute(
            f'UPDATE {table} SET {changes} WHERE {matches}',  # noqa: S608
            (*values.values(), self.run(), *key.values()),
            at,
        )

    def execute(self, statement: str, values: tuple[Value, ...], at: float | None) -> None:
        """Add a statement."""
        self.run()
        # A lone surrogate (a file name in an error text) would make every later commit fail.
        clean = tuple(
            v.encode('utf-8', 'replace').decode() if isinstance(v, str) else v for v in values
        )
        self._pending.append((statement, clean))
        if at is not None:
            self._last_at = max(self._last_at, float(at))

    def alive(self, at: float) -> None:
        """The run goes on, whether or not anything has happened."""
        if at - self._written_at >= ALIVE_S:
            self._last_at = max(self._last_at, float(at))

    def commit(self) -> None:
        """Write what is pending. If the file cannot be written now, it stays pending and a warning
        is logged once.
        """
        run = self.run()
        if not self._pending and self._last_at == self._written_at:
            return
        try:
            with Transaction(self._connection):
                for statement, values in self._pending:
                    self._connection.execute(statement, values)
                self._connection.execute(
                    'UPDATE runs SET last_at = max(last_at, ?) WHERE id = ?', (self._last_at, run)
                )
        except sqlite3.OperationalError as error:
            # A full disk or a stuck lock must not end the training that this ledger describes.
            if not self._complained:
                log.warning(
                    'The ledger %s cannot be written now (%s); its rows are kept in memory, and '
                    'writing is tried again.',
                    self._path,
                    error,
                )
            self._complained = True
            return
        self._pending.clear()
        self._written_at = self._last_at
        self._complained = False

    def run(self) -> int:
        """The number of the run.

        Raises
        ------
        RuntimeError
            Another live thread writes this ledger, or no run has begun.
        """
        me = threading.current_thread()
        if self._owner is None:
            self._owner = me
        elif self._owner is not me:
            if self._owner.is_alive():
                raise RuntimeError(
                    f'The ledger {self._path} is written by thread {self._owner.name!r} and was '
                    f'called from {me.name!r}; all calls must come from one thread.'
                )
            self._owner = me
        if self._run is None:
            raise RuntimeError(
                f'The ledger {self._path} has no run to write to; call begin_run first.'
            )
        return self._run


def as_json(value: object) -> str:
    """Compact JSON; a NumPy number becomes Python's, another unknown object a string."""
    return json.dumps(value, default=_plain, separators=(',', ':'))


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, 'item') else str(value)


def as_int(value: int | None) -> int | None:
    return None if value is None else int(value)


def as_float(value: float | None) -> float | None:
    return None if value is None else float(value)
