"""The reading side of the ledger: from any process, while the run lives."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from parsl_freetrain.core.controller.settings import DecisionSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.event_json import decode_actions, decode_events, from_json
from parsl_freetrain.ledger import schema
from parsl_freetrain.ledger.connection import BUSY_S
from parsl_freetrain.ledger.rows import (
    Batch,
    BlockRow,
    CheckpointRow,
    FragmentRow,
    NodeRow,
    Offer,
    ProgressRow,
    RunHistory,
    RunRow,
    TrainerRow,
)


class Reader:
    """A read-only view of a ledger.

    Parameters
    ----------
    path
        The file; its writer may be at work.

    Raises
    ------
    BadInput
        There is no file, it is no ledger, or it is one of a newer version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise BadInput(f'There is no ledger at {path}; name the file that a run writes.')
        self._cached: tuple[int, str | None, RunHistory] | None = None
        self._died = False
        try:
            self._connection = _connect(self.path)
        except sqlite3.OperationalError as error:
            raise BadInput(
                f'The ledger {path} cannot be read ({error}); give a path that can.'
            ) from error
        except sqlite3.DatabaseError as error:
            raise BadInput(
                f'{path} is not a FreeTrain ledger ({error}); name the file that a run writes.'
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        self._connection.close()

    def newest_run_died(self) -> None:
        """From now on, take the newest run for over: its process is known to be gone."""
        self._died, self._cached = True, None

    def history(self, run: str | None = None) -> RunHistory:
        """Everything but progress reports, events and decisions, of one run or of all; cheap while
        nothing changes.

        Raises
        ------
        BadInput
            The ledger has no run of this name.
        """
        with self._reading():
            version = self._connection.execute('PRAGMA data_version').fetchone()[0]
            if self._cached is not None and self._cached[:2] == (version, run):
                return self._cached[2]
            runs = self._runs()
            latest = runs[-1].id if runs and not self._died else None
            chosen = self._run_id(runs, run)
            history = RunHistory(
                runs=tuple(r for r in runs if chosen in (None, r.id)),
                trainers=tuple(
                    TrainerRow(**row)
                    for row in self._rows('trainers', chosen, 'run, submitted_at, rowid')
                ),
                blocks=tuple(
                    BlockRow(**row) for row in self._rows('blocks', chosen, 'run, opened_at, rowid')
                ),
                nodes=tuple(
                    NodeRow(**row) for row in self._rows('nodes', chosen, 'run, joined_at, rowid')
                ),
                fragments=tuple(
                    FragmentRow(**row)
                    for row in self._rows('fragments', chosen, 'run, decided_at, rowid')
                ),
                checkpoints=tuple(
                    CheckpointRow(**row)
                    for row in self._rows('checkpoints', chosen, 'run, at, rowid')
                ),
                offers=tuple(
                    Offer(**row) for row in self._rows('offers', chosen, 'run, name, start')
                ),
                latest=latest,
            )
        self._cached = (version, run, history)
        return history

    def progress(self, run: str | None = None, trainer: str | None = None) -> list[ProgressRow]:
        """All progress reports, of one trainer or of all, in order of time."""
        return [ProgressRow(**row) for row in self._table('progress', run, trainer)]

    def progress_after(self, row: int, trainer: str, run: int) -> list[tuple[int, ProgressRow]]:
        """The progress reports of a trainer behind a row of the ledger, from run number ``run`` on,
        each with its row.
        """
        with self._reading():
            cursor = self._connection.execute(
                'SELECT rowid, * FROM progress WHERE rowid > ? AND trainer = ? AND run >= ? '
                'ORDER BY rowid',
                (row, trainer, run),
            )
            columns = [column[0] for column in cursor.description[1:]]
            return [
                (rowid, ProgressRow(**{**found, 'metrics': json.loads(found['metrics'])}))
                for rowid, *values in cursor
                for found in [dict(zip(columns, values, strict=True))]
            ]

    def events(
        self, run: str | None = None, kinds: Sequence[str] = (), trainer: str | None = None
    ) -> list[dict[str, Any]]:
        """All events, or those of some kinds or one trainer, in order of time: run, at, kind,
        trainer, fragment, block, node, detail.
        """
        return self._table('events', run, trainer, kinds)

    def decisions(self, run: str | None = None) -> list[dict[str, Any]]:
        """All decisions, in order of time, with the keys of ``DecisionRows.decision``, ``run`` and
        ``id``.
        """
        return self._table('decisions', run, what='rowid AS id, *')

    def batches(self, run: RunRow) -> Iterator[Batch]:
        """What the controller of a run was given, in order.

        Raises
        ------
        BadInput
            A batch is not a list of events.
        """
        with self._reading():
            for seq, at, events in self._connection.execute(
                'SELECT seq, at, events FROM batches WHERE run = ? ORDER BY seq', (run.id,)
            ):
                yield Batch(seq, at, decode_events(events))

    def about(self, run: RunRow) -> dict[str, Any]:
        """Who runs it, where: ``host``, ``pid``, ``started`` (of the process, epoch seconds),
        ``folder``, ``checkpoint_dir``, if known.
        """
        with self._reading():
            row = self._connection.execute(
                "SELECT detail FROM events WHERE run = ? AND kind = 'RunBegan'", (run.id,)
            ).fetchone()
        return dict(json.loads(row[0])) if row else {}

    def recent_decisions(self, run: RunRow, most: int) -> list[dict[str, Any]]:
        """The last decisions of a run, newest first, as :meth:`decisions` has them, each with its
        ``problem`` (None: it was not kept).
        """
        with self._reading():
            asked = {
                decision: json.loads(problem)
                for decision, problem in self._connection.execute(
                    'SELECT decision, problem FROM problems WHERE run = ?', (run.id,)
                )
            }
            rows = list(
                self._rows(
                    'decisions', run.id, f'at DESC, rowid DESC LIMIT {int(most)}', 'rowid AS id, *'
                )
            )
        return [{**row, 'problem': asked.get(row['id'])} for row in rows]

    def recent_events(self, run: RunRow, kinds: Sequence[str], most: int) -> list[dict[str, Any]]:
        """The last events of these kinds, newest first."""
        with self._reading():
            return list(
                self._rows('events', run.id, f'at DESC, rowid DESC LIMIT {int(most)}', kinds=kinds)
            )

    def _table(
        self,
        table: str,
        run: str | None,
        trainer: str | None = None,
        kinds: Sequence[str] = (),
        what: str = '*',
    ) -> list[dict[str, Any]]:
        with self._reading():
            runs = self._runs()
            return list(
                self._rows(table, self._run_id(runs, run), 'run, at, rowid', what, kinds, trainer)
            )

    def _runs(self) -> tuple[RunRow, ...]:
        return tuple(
            RunRow(
                **row, settings=None if settings is None else from_json(settings, DecisionSettings)
            )
            for row in self._rows('runs', None, 'id')
            for settings in [row.pop('settings')]
        )

    def _run_id(self, runs: tuple[RunRow, ...], name: str | None) -> int | None:
        if name is None:
            return None
        for run in runs:
            if run.name == name:
                return run.id
        known = ', '.join(r.name for r in runs[-5:]) or 'none'
        raise BadInput(f'The ledger {self.path} has no run {name!r}; its last runs are: {known}.')

    def _rows(
        self,
        table: str,
        run: int | None,
        order: str,
        what: str = '*',
        kinds: Sequence[str] = (),
        trainer: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        conditions = [
            *(['run = ?'] if run is not None else []),
            *(['trainer = ?'] if trainer is not None else []),
            *([f'kind IN ({", ".join("?" * len(kinds))})'] if kinds else []),
        ]
        where = f' WHERE {" AND ".join(conditions)}' if conditions else ''
        values = tuple(value for value in (run, trainer, *kinds) if value is not None)
        cursor = self._connection.execute(
            f'SELECT {what} FROM {table}{where} ORDER BY {order}',  # noqa: S608
            values,
        )
        columns = [c[0] for c in cursor.description]
        lists, mappings = _LISTS.get(table, ()), _MAPPINGS.get(table, ())
        for values_of_row in cursor:
            row = dict(zip(columns, values_of_row, strict=True))
            for column in lists:
                row[column] = tuple(json.loads(row[column]))
            if table == 'decisions':
                row['actions'] = decode_actions(row['actions'])
            for column in mappings:
                row[column] = json.loads(row[column]) if row[column] is not None else {}
            yield row

    @contextmanager
    def _reading(self) -> Iterator[None]:
        # One transaction, so that all tables are of one moment. A writer that was killed may have
        # left a journal that must be rolled back first.
        try:
            self._begin()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            if self._connection.in_transaction:
                self._connection.execute('ROLLBACK')
            _roll_back_journal(self.path)
            self._begin()
        try:
            yield
        finally:
            if self._connection.in_transaction:
                self._connection.execute('ROLLBACK')

    def _begin(self) -> None:
        self._connection.execute('BEGIN')
        self._connection.execute('SELECT 1 FROM runs LIMIT 1').fetchone()


_LISTS = {'blocks': ('names',), 'fragments': ('nodes',)}
_MAPPINGS = {
    'trainers': ('spec',),
    'fragments': ('metrics',),
    'checkpoints': ('metrics',),
    'progress': ('metrics',),
    'events': ('detail',),
    'decisions': ('current', 'allocation'),
}


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f'file:{quote(str(path.absolute()))}?mode=ro',
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        try:
            schema.check(connection, str(path))
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
            _roll_back_journal(path)
            schema.check(connection, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _roll_back_journal(path: Path) -> None:
    # SQLite takes a journal for left behind only when no writer holds its lock, so this never
    # disturbs a live one.
    connection = sqlite3.connect(
        f'file:{quote(str(path.absolute()))}?mode=rw',
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,
    )
    try:
        connection.execute('SELECT count(*) FROM sqlite_master').fetchone()
    finally:
        connection.close()
