"""``freetrain status``: shows the present state of a run on one screen."""

import time

from rich.console import Console

from parsl_freetrain.cli.live.view import Screen, metric_table
from parsl_freetrain.cli.where import JsonOption, LedgerOption, RunOption, journal_at, print_json
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.report.metrics import metrics_document
from parsl_freetrain.report.status import as_document, snapshot


def status(ledger: LedgerOption = None, run: RunOption = None, as_json: JsonOption = False) -> None:
    """Show trainers and blocks of a run: progress, nodes, rate, efficiency U so far, preemptions,
    expected finish, time left, and how the metrics went.

    Works while the run lives and afterwards, from any computer that sees its file system.
    """
    journal, now = journal_at(ledger), time.time()
    history = journal.history()
    seen = snapshot(history, now, DpAllocator(), run)
    metrics = metrics_document(history, [t.name for t in seen.trainers], now)
    if as_json:
        print_json({'ledger': str(journal.path), **as_document(seen), 'metrics': metrics})
        return
    console = Console()
    console.print(Screen(seen))
    if metrics:
        console.print(metric_table(metrics))
