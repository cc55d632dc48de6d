"""A ledger whose file is damaged, deleted or replaced while a run writes it."""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
from itertools import count
from pathlib import Path

from parsl_freetrain.ledger import schema
from parsl_freetrain.ledger.connection import open_for_writing, transaction

_DAMAGED = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_ERROR,  # its tables are gone
}


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is no longer the ledger that was opened, so that trying again is no use."""
    code = getattr(error, 'sqlite_errorcode', 0)
    return code == sqlite3.SQLITE_READONLY_DBMOVED or code & 0xFF in _DAMAGED


def begin_anew(
    path: Path, damaged: sqlite3.Connection, kept: sqlite3.Connection
) -> tuple[Path | None, sqlite3.Connection]:
    """Set the file aside, and put a new one in its place.

    The new file has the rows of ``kept``, and what can still be read of the damaged one, whose
    connection is closed.

    Returns
    -------
    tuple
        Where the damaged file is now (None: it was gone), and a connection to the new one.

    Raises
    ------
    BadInput, OSError, sqlite3.Error
        If the new file cannot be written.
    """
    draft = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.part')
    try:
        with contextlib.closing(open_for_writing(draft)) as fresh, transaction(fresh):
            _copy(kept, fresh)
            _copy(damaged, fresh)
        damaged.close()
        aside = _set_aside(path)
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    return aside, open_for_writing(path)


def _copy(source: sqlite3.Connection, target: sqlite3.Connection) -> None:
    """Copy the rows that can be read and that the target does not have."""
    for table in schema.NAMES:
        # The table of problems refers to the numbers of decisions.
        number = 'rowid, ' if table == 'decisions' else ''
        with contextlib.suppress(sqlite3.Error):
            rows = source.execute(f'SELECT {number}* FROM {table}')  # noqa: S608
            columns = ', '.join(f'"{column}"' for column, *_ in rows.description)
            marks = ', '.join('?' * len(rows.description))
            insert = f'INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})'  # noqa: S608
            for row in rows:
                target.execute(insert, row)


def _set_aside(path: Path) -> Path | None:
    aside = next(
        aside
        for n in count(1)
        if not (aside := path.with_name(f'{path.name}.damaged-{n}')).exists()
    )
    # SQLite would roll the journal of the damaged file back into the new one.
    with contextlib.suppress(FileNotFoundError):
        path.with_name(f'{path.name}-journal').rename(f'{aside}-journal')
    try:
        return path.rename(aside)
    except FileNotFoundError:
        return None
