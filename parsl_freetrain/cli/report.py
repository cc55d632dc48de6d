"""``freetrain report``: what a run came to, as one HTML file."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from parsl_freetrain.cli.where import JsonOption, LedgerOption, ledger_at, run_named
from parsl_freetrain.core.errors import BadInput


def report(
    ledger: LedgerOption = None,
    run: Annotated[str, typer.Option('--run', metavar='NAME', help='A run of the ledger, by the beginning of its name.')] = 'all',
    out: Annotated[Path, typer.Option('--out', metavar='FILE', help='The file to write.')] = Path('freetrain-report.html'),
    as_json: JsonOption = False,
) -> None:
    """Write one HTML file that needs nothing else: node-hours, trainers, losses, rescale costs, predictions and what came true."""
    # The help is there without them.
    from parsl_freetrain.core.dp import DpAllocator
    from parsl_freetrain.ledger.reader import Reader
    from parsl_freetrain.report.figures import as_document, figures
    from parsl_freetrain.report.page import report_page

    with Reader(ledger_at(ledger)) as reader:
        named = None if run == 'all' else run_named([r.name for r in reader.story().runs], run)
        found = figures(reader, named, time.time(), DpAllocator())
    _write(out, report_page(found))
    if as_json:
        print(json.dumps({'report': str(out.absolute()), **as_document(found)}))
    else:
        print(f'{out.absolute()}: open it in a browser.')


def _write(path: Path, text: str) -> None:
    """At once or not at all, and for nobody else to read: it has names, commands and errors in it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f'.{path.name}.')
        try:
            with os.fdopen(handle, 'w', encoding='utf-8', errors='replace') as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise BadInput(f'The report {path} cannot be written ({error.strerror}); give another file with --out.') from error
