"""The tables of a ledger, and the check that a file is one."""

from __future__ import annotations

import sqlite3

from parsl_freetrain.core.model.errors import BadInput

VERSION = 5
"""Stands in ``PRAGMA user_version``; raised whenever a table changes."""

APPLICATION_ID = 0x46725472
"""Stands in ``PRAGMA application_id``: tells a ledger from any other SQLite file."""

# Times are epoch seconds. Lists and mappings are JSON. Everything is keyed by run, because a
# resumed workflow appends to the same ledger and may number a fragment again whose first attempt
# left no checkpoint.
TABLES = (
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, begun_at REAL NOT NULL, ended_at REAL,
        how TEXT, last_at REAL NOT NULL, parsl_run_dir TEXT NOT NULL, command TEXT NOT NULL,
        settings TEXT)""",
    """CREATE TABLE events (
        run INTEGER NOT NULL, at REAL NOT NULL, kind TEXT NOT NULL, trainer TEXT,
        fragment INTEGER, block TEXT, node TEXT, detail TEXT)""",
    """CREATE TABLE batches (
        run INTEGER NOT NULL, seq INTEGER NOT NULL, at REAL NOT NULL, events TEXT NOT NULL,
        PRIMARY KEY (run, seq))""",
    """CREATE TABLE decisions (
        run INTEGER NOT NULL, batch INTEGER, at REAL NOT NULL, trigger TEXT NOT NULL,
        nodes INTEGER NOT NULL, status TEXT NOT NULL, solver TEXT NOT NULL,
        objective REAL NOT NULL, bound REAL, staying REAL NOT NULL, seconds REAL NOT NULL,
        current TEXT NOT NULL, allocation TEXT NOT NULL, actions TEXT NOT NULL)""",
    """CREATE TABLE trainers (
        run INTEGER NOT NULL, name TEXT NOT NULL, submitted_at REAL NOT NULL, spec TEXT NOT NULL,
        total_samples INTEGER, first_samples INTEGER NOT NULL, samples INTEGER NOT NULL,
        state TEXT NOT NULL, state_at REAL NOT NULL, why TEXT NOT NULL, PRIMARY KEY (run, name))""",
    """CREATE TABLE blocks (
        run INTEGER NOT NULL, block TEXT NOT NULL, opened_at REAL NOT NULL, job_id TEXT,
        nodes INTEGER NOT NULL, walltime_s REAL, until REAL, names TEXT NOT NULL,
        node_class TEXT NOT NULL, closed_at REAL, how TEXT, PRIMARY KEY (run, block))""",
    """CREATE TABLE nodes (
        run INTEGER NOT NULL, node TEXT NOT NULL, block TEXT NOT NULL, name TEXT NOT NULL,
        joined_at REAL NOT NULL, left_at REAL, how TEXT, PRIMARY KEY (run, node))""",
    """CREATE TABLE fragments (
        run INTEGER NOT NULL, trainer TEXT NOT NULL, fragment INTEGER NOT NULL,
        decided_at REAL NOT NULL, task_id INTEGER, nodes TEXT NOT NULL, deadline REAL,
        from_samples INTEGER NOT NULL, started_at REAL, started_samples INTEGER, seen_at REAL,
        seen_samples INTEGER, rate REAL, metrics TEXT, ended_at REAL, ending TEXT,
        samples INTEGER, reached INTEGER, error TEXT, PRIMARY KEY (run, trainer, fragment))""",
    """CREATE TABLE progress (
        run INTEGER NOT NULL, trainer TEXT NOT NULL, fragment INTEGER NOT NULL,
        at REAL NOT NULL, samples INTEGER NOT NULL, rate REAL, metrics TEXT NOT NULL)""",
    """CREATE TABLE checkpoints (
        run INTEGER NOT NULL, trainer TEXT NOT NULL, fragment INTEGER NOT NULL,
        at REAL NOT NULL, samples INTEGER NOT NULL, path TEXT NOT NULL, seconds REAL NOT NULL,
        pause_s REAL NOT NULL, metrics TEXT NOT NULL)""",
    """CREATE TABLE offers (
        run INTEGER NOT NULL, name TEXT NOT NULL, start REAL NOT NULL, "end" REAL)""",
    """CREATE TABLE problems (
        run INTEGER NOT NULL, decision INTEGER NOT NULL, problem TEXT NOT NULL)""",
    'CREATE INDEX events_by_run ON events (run, at)',
    'CREATE INDEX decisions_by_run ON decisions (run, at)',
    'CREATE INDEX progress_by_fragment ON progress (run, trainer, fragment, at)',
    'CREATE INDEX checkpoints_by_fragment ON checkpoints (run, trainer, fragment, at)',
    'CREATE INDEX offers_by_node ON offers (run, name)',
)

NAMES = tuple(statement.split()[2] for statement in TABLES if statement.startswith('CREATE TABLE'))
"""The names of the tables."""


def create(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty database, in the transaction that the caller opened."""
    for statement in TABLES:
        connection.execute(statement)
    connection.execute(f'PRAGMA application_id = {APPLICATION_ID}')
    connection.execute(f'PRAGMA user_version = {VERSION}')


def is_empty(connection: sqlite3.Connection) -> bool:
    """Whether the database has no table yet."""
    tables: int = connection.execute('SELECT count(*) FROM sqlite_master').fetchone()[0]
    return tables == 0


def check(connection: sqlite3.Connection, path: str) -> None:
    """Raise BadInput unless the database is a ledger of a version that this release can use."""
    if is_empty(connection):
        raise BadInput(f'{path} is empty: no run has written to it yet.')
    version: int = connection.execute('PRAGMA user_version').fetchone()[0]
    if connection.execute('PRAGMA application_id').fetchone()[0] != APPLICATION_ID:
        raise BadInput(
            f'{path} is a database but not a FreeTrain ledger; name a ledger, or a file '
            'that does not exist yet.'
        )
    if version != VERSION:
        raise BadInput(
            f'{path} is a ledger of version {version}, and this parsl-freetrain reads version '
            f'{VERSION}; use the release that wrote it.'
        )
