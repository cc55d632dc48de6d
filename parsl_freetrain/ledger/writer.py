"""The writing side of the ledger."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsl_freetrain.core.controller.settings import DecisionSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.event_json import to_json
from parsl_freetrain.ledger.connection import BUSY_S, open_for_writing, transaction, wait_at_most
from parsl_freetrain.ledger.decision_rows import DecisionRows
from parsl_freetrain.ledger.node_rows import NodeRows
from parsl_freetrain.ledger.pending_rows import LAST_S, PendingRows, as_int, as_json
from parsl_freetrain.ledger.trainer_rows import TrainerRows


class Ledger:
    """The one writer of a ledger file.

    Rows are kept in memory until :meth:`commit`, which writes them in one short transaction: a
    reader never sees half of a round of the event loop and is never locked out for long. The file
    has a rollback journal, not a write-ahead log, because it may lie on NFS or Lustre; after kill
    -9 of the writer it holds everything up to the last commit.

    All times are ``time.time()`` epoch seconds. One thread calls all methods; another may take over
    when that one has ended, or by beginning a run.

    Parameters
    ----------
    path
        The file; created, with its missing parents, for the user alone (0600 in 0700). An existing
        ledger is appended to.

    Attributes
    ----------
    decisions, nodes, trainers
        The rows of the run that was begun, by subject.

    Raises
    ------
    BadInput
        ``path`` cannot be written, is no ledger, or is one of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._rows = PendingRows(self.path, open_for_writing(self.path))
        self._start_tables()

    @property
    def _connection(self) -> sqlite3.Connection:
        return self._rows.connection

    def _start_tables(self) -> None:
        self.decisions = DecisionRows(self._rows)
        self.nodes = NodeRows(self._rows)
        self.trainers = TrainerRows(self._rows)

    def close(self) -> None:
        """Commit and close the file; calling it again does nothing. Readers are waited for longer
        than before, since this is the last time.
        """
        if self._rows.has_run:
            self._rows.commit(LAST_S)
        self._rows.end()

    def begin_run(
        self,
        run: str,
        *,
        at: float,
        parsl_run_dir: str,
        command: str,
        about: Mapping[str, Any] | None = None,
        settings: DecisionSettings | None = None,
    ) -> None:
        """Start a run (or a resume); written at once. ``run`` is Parsl's run id, unique within the
        ledger.

        Parameters
        ----------
        about
            Who runs it, where: the detail of an event of kind 'RunBegan'.
        settings
            How its decisions are made; a run without them cannot be replayed.

        Raises
        ------
        BadInput
            The ledger has a run of this name, or cannot be written.
        """
        try:
            wait_at_most(self._connection, BUSY_S)
            with transaction(self._connection):
                cursor = self._connection.execute(
                    'INSERT INTO runs (name, begun_at, last_at, parsl_run_dir, command, settings) '
                    'VALUES (?, ?, ?, ?, ?, ?)',
                    (
                        str(run),
                        float(at),
                        float(at),
                        str(parsl_run_dir),
                        str(command),
                        None if settings is None else to_json(settings),
                    ),
                )
                if about is not None:
                    self._connection.execute(
                        "INSERT INTO events (run, at, kind, detail) VALUES (?, ?, 'RunBegan', ?)",
                        (cursor.lastrowid, float(at), as_json(about)),
                    )
        except sqlite3.IntegrityError:
            raise BadInput(
                f'The ledger {self.path} has a run {run!r} already; each run needs a '
                'name of its own.'
            ) from None
        except sqlite3.Error as error:
            raise BadInput(
                f'The ledger {self.path} cannot be written ({error}); give a path that can.'
            ) from error
        self._rows.begin(cursor.lastrowid or 0, float(at))
        self._start_tables()

    def end_run(self, run: str, *, at: float, how: str) -> None:
        """End the run that was begun, for example ``how='done'`` or ``'interrupted'``; written at
        once, or by :meth:`close` if the file is locked.
        """
        self._rows.execute(
            'UPDATE runs SET ended_at = ?, how = ? WHERE name = ?',
            (float(at), str(how), str(run)),
            at,
        )
        self.commit()

    def event(
        self,
        *,
        at: float,
        kind: str,
        trainer: str | None = None,
        fragment: int | None = None,
        block: str | None = None,
        node: str | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an event."""
        self._rows.insert(
            'events',
            {
                'at': float(at),
                'kind': str(kind),
                'trainer': trainer,
                'fragment': as_int(fragment),
                'block': block,
                'node': node,
                'detail': None if detail is None else as_json(detail),
            },
            at,
        )

    def alive(self, at: float) -> None:
        """The run goes on, whether or not anything has happened."""
        self._rows.alive(at)

    def commit(self) -> None:
        """Write what is pending. If the file cannot be written now, it stays pending and a warning
        is logged once: a reader may have locked it, and training does not wait for that. A damaged
        file is set aside, and a new one takes its place. After :meth:`close` there is nothing to
        write.
        """
        if self._rows.has_run:
            self._rows.commit()
