"""A journal as tables, for those who ask in SQL: ``freetrain export``, Parsl's monitoring."""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.core.model.state import History, RunState

BUSY_S = 5.0

# By table: what it has a row for, and the columns after ``run``; where one has another name, the
# path to its value, whose parts may be methods without arguments, and places in a list.
_TABLES: dict[str, tuple[Callable[[RunState], Iterable[Any]], str]] = {
    'runs': (
        lambda run: [run],
        'name begun_at=began.at ended_at how last_at command=began.command',
    ),
    'trainers': (
        lambda run: run.trainers.values(),
        'name submitted_at=submitted.at min_nodes=trainer.counts.0 max_nodes=trainer.counts.-1 '
        'mode=submitted.mode total_samples=trainer.total_samples first_samples=submitted.samples '
        'samples state state_at why',
    ),
    'blocks': (
        lambda run: run.blocks.values(),
        'block=name job_id=opened.job_id opened_at=opened.at nodes=opened.request.nodes '
        'walltime_s=opened.request.walltime_s queue=opened.request.queue '
        'node_class=opened.request.node_class begun_at=begun until closed_at how',
    ),
    'nodes': (lambda run: run.nodes.values(), 'node block name joined_at left_at how'),
    'fragments': (
        lambda run: run.fragments.values(),
        'trainer fragment=number decided_at=launched.at task_id=launched.task nodes '
        'deadline=launched.deadline_s from_samples=launched.samples shape started_at '
        'started_samples ended_at ending samples reached error=ended.error',
    ),
    'checkpoints': (
        lambda run: run.checkpoints,
        'trainer fragment at samples path seconds pause_s metrics',
    ),
    'progress': (
        lambda run: [one for fragment in run.fragments.values() for one in fragment.progress],
        'trainer fragment at samples rate metrics',
    ),
    'decisions': (
        lambda run: run.decisions,
        'at trigger nodes status solver objective bound staying seconds current allocation actions',
    ),
}
TABLES = tuple(_TABLES)


def _cell(value: Any, path: str) -> Any:
    """The value at a path, or None; what holds several is written as JSON."""
    for part in path.split('.'):
        if value is None:
            return None
        value = value[int(part)] if part.lstrip('-').isdigit() else getattr(value, part)
        value = value() if callable(value) else value
    several = isinstance(value, (tuple, dict))
    return json.dumps(value, default=msgspec.to_builtins) if several else value


def rows(history: History, table: str) -> Iterator[dict[str, Any]]:
    """The rows of a table over all runs; times in seconds since the epoch."""
    of_run, columns = _TABLES[table]
    names = [(name, path or name) for name, _, path in (c.partition('=') for c in columns.split())]
    for run in history.runs:
        for one in of_run(run):
            cells = {name: _cell(one, path) for name, path in names}
            yield {'run_id': run.name, 'run': run.id, **cells}


def write_sqlite(history: History, database: Path, prefix: str = '') -> None:
    """Replace these runs in the tables of an SQLite file, in one transaction; or sqlite3.Error."""
    address = f'file:{quote(str(database.absolute()))}'
    opened = sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None)
    with closing(opened) as connection:
        connection.execute('BEGIN IMMEDIATE')
        for table in TABLES:
            name, made = f'{prefix}{table}', False
            for row in rows(history, table):
                if not made:
                    made = True
                    columns = ', '.join(f'"{column}"' for column in row)
                    connection.execute(f'CREATE TABLE IF NOT EXISTS {name} ({columns})')
                    marks = ', '.join('?' * len(row))
                    connection.executemany(
                        f'DELETE FROM {name} WHERE run_id = ?',  # noqa: S608
                        [(run.name,) for run in history.runs],
                    )
                connection.execute(f'INSERT INTO {name} VALUES ({marks})', tuple(row.values()))  # noqa: S608
        connection.execute('COMMIT')


def write_parquet(history: History, folder: Path) -> None:
    with needs('Writing Parquet files'):
        import pandas as pd
        import pyarrow  # noqa: F401  # pandas writes them with it

    folder.mkdir(parents=True, exist_ok=True)
    for table in TABLES:
        pd.DataFrame(list(rows(history, table))).to_parquet(folder / f'{table}.parquet')
