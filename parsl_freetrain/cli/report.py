"""``freetrain report``: writes the report on a run into one HTML file."""

import time
from pathlib import Path
from typing import Annotated

from parsl_freetrain.cli.where import JsonOption, LedgerOption, journal_at, print_json, value
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.errors import of_file
from parsl_freetrain.host import files
from parsl_freetrain.report.figures import Figures, as_document
from parsl_freetrain.report.metrics import MetricView
from parsl_freetrain.report.page import report_page
from parsl_freetrain.report.runs import chosen, life_of


def report(
    ledger: LedgerOption = None,
    run: Annotated[
        str, value('NAME', 'A run of the ledger, by the beginning of its name.', '--run')
    ] = 'all',
    out: Annotated[Path, value('FILE', 'The file to write.', '--out')] = Path(
        'freetrain-report.html'
    ),
    axis: Annotated[
        str, value('NAME', 'Horizontal axis of metrics: samples, epochs or seconds.', '--axis')
    ] = 'samples',
    smooth: Annotated[
        float, value('W', 'Weight of a moving average of metrics: 0 (none) to below 1.', '--smooth')
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML file that needs nothing else: node-hours, trainers, metrics, rescale costs,
    predictions and what came true.
    """
    view = MetricView(axis, smooth)
    journal = journal_at(ledger)
    history = journal.history()
    one = chosen(history, journal.path, None if run == 'all' else run)
    if life_of(history, history.runs[-1], time.time()).state == 'died':
        history.latest = None
    history = history if run == 'all' else history.of(one.name)
    found = Figures(history, time.time(), DpAllocator())
    page = report_page(found, view).encode(errors='replace')
    with of_file(f'The report {out} cannot be written', 'give another file with --out'):
        # For the user alone: the page has names, commands and errors.
        files.replace(out.absolute(), page)
    if as_json:
        print_json({'report': str(out.absolute()), **as_document(found)})
    else:
        print(f'{out.absolute()}: open it in a browser.')
