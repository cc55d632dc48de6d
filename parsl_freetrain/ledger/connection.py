"""How the ledger's file is opened and locked."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host import files
from parsl_freetrain.host.ownership import is_ours, refuse_foreign
from parsl_freetrain.ledger import schema

BUSY_S = 30.0
"""How long readers wait for the writer, in seconds, and the writer for readers when it opens a file
or begins a run.
"""


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = 'IMMEDIATE') -> Iterator[None]:
    """``BEGIN`` to commit, or back; sqlite3's own context manager does not begin.

    Parameters
    ----------
    kind
        'IMMEDIATE': waits for readers at the end. 'EXCLUSIVE': at the beginning.
    """
    connection.execute(f'BEGIN {kind}')
    try:
        yield
        connection.execute('COMMIT')
    finally:
        if connection.in_transaction:
            connection.execute('ROLLBACK')


def wait_at_most(connection: sqlite3.Connection, seconds: float) -> None:
    """How long each statement waits for a lock from now on."""
    connection.execute(f'PRAGMA busy_timeout = {round(1000 * seconds)}')


def open_for_writing(path: Path) -> sqlite3.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # SQLite would create the file with the umask's permissions; its journal takes those of the
        # file. An existing file is not opened here: closing it would drop the locks of this
        # process's readers.
        # What can replace the file or its journal can change what is in it.
        refuse_foreign(path.parent, 'folder of the ledger')
        try:
            files.create(path).close()
        except FileExistsError:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise BadInput(
                    f'{path} is not a regular file; name a ledger, or a file that does '
                    'not exist yet.'
                ) from None
            if not is_ours(found.st_uid, path.parent):
                raise BadInput(
                    f'The ledger {path} belongs to another user (id {found.st_uid}); name a file '
                    'of your own.'
                ) from None
            if found.st_mode & 0o077:
                path.chmod(files.PRIVATE)
    except OSError as error:
        raise BadInput(
            f'The ledger {path} cannot be written ({error.strerror}); give a path that can.'
        ) from error
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        with transaction(connection):
            if schema.is_empty(connection):
                schema.create(connection)
        schema.check(connection, str(path))
        connection.execute('PRAGMA journal_mode = DELETE')
        connection.execute('PRAGMA synchronous = NORMAL')
    except sqlite3.OperationalError as error:
        connection.close()
        raise BadInput(
            f'The ledger {path} cannot be written ({error}); give a path that can.'
        ) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise BadInput(
            f'{path} is not a FreeTrain ledger ({error}); name a ledger, or a file that '
            'does not exist yet.'
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection
