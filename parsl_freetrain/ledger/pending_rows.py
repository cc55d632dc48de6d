"""Rows that wait to be written into a ledger, and the transaction that writes them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.ledger import damage, schema
from parsl_freetrain.ledger.connection import transaction, wait_at_most

log = logging.getLogger(__name__)

Value = str | int | float | None

ALIVE_S = 30.0
"""Seconds after which a run that has nothing to write notes that it is alive."""

WRITE_S = 1.0
AGAIN_S = 0.05
LAST_S = 10.0
"""How long a commit waits for readers, in seconds: the first time, while they hold the file, and at
the end of a run. The event loop waits as long.
"""

MOST_HELD = 50_000_000
"""About how many bytes wait at most for a file that cannot be written."""

KEPT = ('runs', 'trainers', 'blocks', 'nodes', 'fragments')
"""Tables whose rows are kept in memory too. They are changed later and others refer to them, so a
new file needs them where the ledger is damaged.
"""


class PendingRows:
    """Statements of one run, kept in memory until :meth:`commit`.

    One thread calls all methods; another may take over when that one has ended, or by beginning a
    run.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self.connection = connection
        self._kept = sqlite3.connect(':memory:', isolation_level=None, check_same_thread=False)
        schema.create(self._kept)
        self._pending: list[tuple[str, tuple[Value, ...]]] = []
        self._held = 0  # about how many bytes they have
        self._thin_at = MOST_HELD
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
        row = self.connection.execute('SELECT * FROM runs WHERE id = ?', (run,)).fetchone()
        self._kept.execute(f'INSERT OR REPLACE INTO runs VALUES ({", ".join("?" * len(row))})', row)  # noqa: S608
        self._last_at = self._written_at = at
        self._owner = None

    def end(self) -> None:
        """Accept no more rows, and close the file."""
        if self._pending:
            log.warning('The ledger %s lacks its last rows: it cannot be written.', self._path)
            self._pending.clear()
        self._run = None
        self._kept.close()
        self.connection.close()

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
        self._held += _size(clean)
        if self._held > self._thin_at:
            self._thin()
        if at is not None:
            self._last_at = max(self._last_at, float(at))

    def _thin(self) -> None:
        """Leave out what no other row refers to, and changes that a later one replaces."""
        before, last = len(self._pending), dict[object, int]()
        for place, (statement, values) in enumerate(self._pending):
            if _table(statement) in KEPT:
                _, where, matches = statement.partition(' WHERE ')
                key = values[len(values) - matches.count('?') :] if where else place
                last[statement, key] = place
        self._pending = [self._pending[place] for place in sorted(last.values())]
        self._held = sum(_size(values) for _, values in self._pending)
        self._thin_at = max(MOST_HELD, 2 * self._held)
        log.warning(
            'The ledger %s could not be written for long. %d rows are left out, so reports will '
            'lack something of this time.',
            self._path,
            before - len(self._pending),
        )

    def alive(self, at: float) -> None:
        """The run goes on, whether or not anything has happened."""
        if at - self._written_at >= ALIVE_S:
            self._last_at = max(self._last_at, float(at))

    def commit(self, wait_s: float | None = None) -> None:
        """Write what is pending. If the file cannot be written now, it stays pending and a warning
        is logged once. A damaged file is set aside, and a new one takes its place.

        Parameters
        ----------
        wait_s
            How long to wait for readers, in seconds; default: less while they hold the file.
        """
        if wait_s is None:
            wait_s = AGAIN_S if self._complained else WRITE_S
        self.run()
        if not self._pending and self._last_at == self._written_at:
            return
        # Nothing that happens to this file may end the training that it describes.
        try:
            try:
                self._write(wait_s)
            except sqlite3.Error as error:
                if not damage.is_damage(error):
                    raise
                self._begin_anew(error)
                self._write(wait_s)
        except (sqlite3.Error, OSError, BadInput) as error:
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
        self._held, self._thin_at = 0, MOST_HELD
        self._written_at = self._last_at
        self._complained = False

    def _write(self, wait_s: float) -> None:
        wait_at_most(self.connection, wait_s)
        # A reader in the way is met before the rows, so that these are not tried in vain each time.
        with transaction(self.connection, 'EXCLUSIVE'):
            for statement, values in self._statements():
                try:
                    self.connection.execute(statement, values)
                except (sqlite3.IntegrityError, sqlite3.InterfaceError, OverflowError) as error:
                    # It would keep all later rows out of the file.
                    log.warning('The ledger %s leaves out %s (%s)', self._path, values, error)
        for statement, values in self._statements():
            if _table(statement) in KEPT:
                with contextlib.suppress(sqlite3.Error, OverflowError):
                    self._kept.execute(statement, values)

    def _statements(self) -> Iterator[tuple[str, tuple[Value, ...]]]:
        yield from self._pending
        yield ('UPDATE runs SET last_at = max(last_at, ?) WHERE id = ?', (self._last_at, self._run))

    def _begin_anew(self, error: sqlite3.Error) -> None:
        aside, self.connection = damage.begin_anew(self._path, self.connection, self._kept)
        log.warning(
            'The ledger %s was damaged while it was written (%s). It is %s, and the run goes on '
            'with a new file of this name, which has what could still be read. Reports and budgets '
            'may lack something of the time before.',
            self._path,
            error,
            'gone' if aside is None else f'kept as {aside}',
        )

    def run(self) -> int:
        """The number of the run. Raises RuntimeError if another live thread writes this ledger, or
        no run has begun.
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


def _table(statement: str) -> str:
    """The table that a statement changes."""
    found = re.match(r'(?:INSERT (?:OR \w+ )?INTO|UPDATE|DELETE FROM) (\w+)', statement)
    assert found is not None
    return found[1]


def _size(values: tuple[Value, ...]) -> int:
    """About how many bytes a statement takes up while it waits."""
    return 500 + sum(len(value) for value in values if isinstance(value, str))


def as_json(value: object) -> str:
    """Compact JSON; a NumPy number becomes Python's, another unknown object a string."""
    return json.dumps(value, default=_plain, separators=(',', ':'))


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, 'item') else str(value)


def as_int(value: int | None) -> int | None:
    return None if value is None else int(value)


def as_float(value: float | None) -> float | None:
    return None if value is None else float(value)
