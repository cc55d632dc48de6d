"""``freetrain export``: the record of runs as tables, for questions in SQL or pandas."""

import sqlite3
from pathlib import Path
from typing import Annotated

from parsl_freetrain.cli.where import LedgerOption, RunOption, journal_at, value
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.tables import write_parquet, write_sqlite
from parsl_freetrain.report.runs import chosen


def export(
    ledger: LedgerOption = None,
    run: RunOption = None,
    sqlite: Annotated[Path | None, value('FILE', 'An SQLite file; its other tables stay.')] = None,
    parquet: Annotated[
        Path | None, value('FOLDER', 'A folder, with a file for each table.')
    ] = None,
) -> None:
    """Write what a ledger says as tables: runs, trainers, blocks, nodes, fragments, checkpoints,
    progress, decisions. Times are in seconds since the epoch.
    """
    if sqlite is None and parquet is None:
        raise BadInput('Say where to: --sqlite FILE or --parquet FOLDER.')
    journal = journal_at(ledger)
    history = journal.history()
    if run:
        history = history.of(chosen(history, journal.path, run).name)
    try:
        for write, place in ((write_sqlite, sqlite), (write_parquet, parquet)):
            if place is not None:
                write(history, place)
                print(f'Wrote {place}.')
    except (OSError, sqlite3.Error) as error:
        raise BadInput(
            f'The tables cannot be written ({error}); name a place where they can.'
        ) from None
