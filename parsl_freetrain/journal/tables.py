"""A journal as tables, for those who ask in SQL: ``freetrain export``, Parsl's monitoring."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from parsl_freetrain.core.model.errors import needs
from parsl_freetrain.core.model.state import History, RunState

BUSY_S = 5.0

Row = dict[str, Any]


def _runs(run: RunState) -> Iterator[Row]:
    yield {
        'run': run.id, 'name': run.name, 'begun_at': run.began.at, 'ended_at': run.ended_at,
        'how': run.how, 'last_at': run.last_at, 'command': run.began.command,
    }  # fmt: skip


def _trainers(run: RunState) -> Iterator[Row]:
    for one in run.trainers.values():
        yield {
            'run': run.id, 'name': one.name, 'submitted_at': one.submitted.at,
            'min_nodes': one.trainer.counts()[0], 'max_nodes': one.trainer.counts()[-1],
            'mode': one.submitted.mode, 'total_samples': one.trainer.total_samples,
            'first_samples': one.submitted.samples, 'samples': one.samples, 'state': one.state,
            'state_at': one.state_at, 'why': one.why,
        }  # fmt: skip


def _blocks(run: RunState) -> Iterator[Row]:
    for one in run.blocks.values():
        request = one.opened.request
        yield {
            'run': run.id, 'block': one.name, 'job_id': one.opened.job_id,
            'opened_at': one.opened.at, 'nodes': request.nodes, 'walltime_s': request.walltime_s,
            'queue': request.queue, 'node_class': request.node_class, 'begun_at': one.begun,
            'until': one.until, 'closed_at': one.closed_at, 'how': one.how,
        }  # fmt: skip


def _nodes(run: RunState) -> Iterator[Row]:
    return map(asdict, run.nodes.values())


def _fragments(run: RunState) -> Iterator[Row]:
    for one in run.fragments.values():
        yield {
            'run': run.id, 'trainer': one.trainer, 'fragment': one.number,
            'decided_at': one.launched.at, 'task_id': one.launched.task,
            'nodes': json.dumps(one.nodes), 'deadline': one.launched.deadline_s,
            'from_samples': one.launched.samples, 'shape': one.shape, 'started_at': one.started_at,
            'started_samples': one.started_samples, 'ended_at': one.ended_at,
            'ending': one.ending, 'samples': one.samples, 'reached': one.reached,
            'error': one.ended and one.ended.error,
        }  # fmt: skip


def _checkpoints(run: RunState) -> Iterator[Row]:
    for one in run.checkpoints:
        yield {
            'run': run.id, 'trainer': one.trainer, 'fragment': one.fragment, 'at': one.at,
            'samples': one.samples, 'path': one.path, 'seconds': one.seconds,
            'pause_s': one.pause_s, 'metrics': json.dumps(one.metrics),
        }  # fmt: skip


def _progress(run: RunState) -> Iterator[Row]:
    for fragment in run.fragments.values():
        for one in fragment.progress:
            yield {
                'run': run.id, 'trainer': one.trainer, 'fragment': one.fragment, 'at': one.at,
                'samples': one.samples, 'rate': one.rate, 'metrics': json.dumps(one.metrics),
            }  # fmt: skip


def _decisions(run: RunState) -> Iterator[Row]:
    for one in run.decisions:
        yield {
            'run': run.id, 'at': one.at, 'trigger': one.trigger, 'nodes': one.nodes,
            'status': one.status, 'solver': one.solver, 'objective': one.objective,
            'bound': one.bound, 'staying': one.staying, 'seconds': one.seconds,
            'current': json.dumps(one.current), 'allocation': json.dumps(one.allocation),
            'actions': msgspec.json.encode(one.actions).decode(),
        }  # fmt: skip


_ALL = _runs, _trainers, _blocks, _nodes, _fragments, _checkpoints, _progress, _decisions
TABLES: dict[str, Callable[[RunState], Iterator[Row]]] = {
    one.__name__.removeprefix('_'): one for one in _ALL
}


def rows(history: History, table: str) -> Iterator[Row]:
    """The rows of a table over all runs; times in seconds since the epoch."""
    for run in history.runs:
        for row in TABLES[table](run):
            yield {'run_id': run.name, **row}


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
