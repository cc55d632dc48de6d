"""``freetrain watch``: shows the state of a run live until it ends."""

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.live import Live

from parsl_freetrain.cli.live.view import LiveView, Screen, plain_lines
from parsl_freetrain.cli.live.web import LivePage, Page
from parsl_freetrain.cli.where import LedgerOption, RunOption, flag, ledger_at, print_json, value
from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.checked_values import Seconds, check_value
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.status import RunStatus, as_document

PLAIN_S = 10.0  # default seconds between two updates if the output is not a terminal
WAIT_S = 0.5  # seconds between two looks for a run that has not begun
PAGE_S = 5.0  # least default seconds between two versions of the page
TERMINAL_S = 1.0  # default seconds between two updates on a terminal


def watch(
    ledger: LedgerOption = None,
    run: RunOption = None,
    every: Annotated[
        float,
        value('S', 'Seconds between two updates. Default: 1 on a terminal, 5 with --web, else 10.'),
    ] = 0.0,
    as_json: Annotated[
        bool, flag('One JSON document per update, as of status --json, each on a line.', '--json')
    ] = False,
    web: Annotated[
        bool, flag('Serve a page for a browser on this computer, and print its address.', '--web')
    ] = False,
    port: Annotated[int, value('N', 'Where to serve the page; 0: any free port.')] = 0,
) -> None:
    """Show the state of a run, live, until it is over (with --web: until Ctrl-C).

    Ctrl-C ends the view only, not the run.
    """
    check_value('--every', every, Seconds)
    if port and not web:
        raise BadInput('--port says where --web serves its page; give both or neither.')
    pause = threading.Event()  # an interruptible sleep
    with suppress(KeyboardInterrupt):
        journal = _awaited(ledger, keep_progress=web)
        view, console = LiveView(journal, DpAllocator(), run), Console()
        if web:
            _serve(journal, run, every or PAGE_S, port, as_json, pause)
        elif as_json:
            said = {'ledger': str(journal.path)}
            _follow(view, lambda s: print_json(said | as_document(s)), every or PLAIN_S, pause)
        elif not console.is_terminal:
            _follow(view, lambda seen: _print_lines(console, seen), every or PLAIN_S, pause)
        else:
            _draw(view, console, every or TERMINAL_S, pause)


def _awaited(given: Path | None, keep_progress: bool) -> Journal:
    said = ''
    while True:
        try:
            path = ledger_at(given)
        except BadInput as error:
            why = str(error)
        else:
            if path.exists() and path.stat().st_size:
                journal = Journal(path, keep_progress=keep_progress)
                if journal.history().runs:
                    return journal
            why = f'The ledger {path} has no run yet.'
        if why != said:
            print(f'{why} Waiting for a run to begin; Ctrl-C ends this.', file=sys.stderr)
            said = why
        time.sleep(WAIT_S)


def _follow(
    view: LiveView, show: Callable[[RunStatus], None], every_s: float, pause: threading.Event
) -> None:
    while True:
        seen = view.snapshot(time.time())
        show(seen)
        if seen.life.state not in ('running', 'silent'):  # what was shown last
            return
        pause.wait(every_s)


def _draw(view: LiveView, console: Console, every_s: float, pause: threading.Event) -> None:
    with Live(console=console, auto_refresh=False, vertical_overflow='ellipsis') as live:
        _follow(view, lambda seen: live.update(Screen(seen), refresh=True), every_s, pause)


def _serve(
    journal: Journal,
    run: str | None,
    every_s: float,
    port: int,
    as_json: bool,
    pause: threading.Event,
) -> None:
    page = Page(LivePage(journal, run, every_s).newest, port)
    try:
        hint = f'Open {page.address}\nCtrl-C ends the page, and nothing else.'
        print(json.dumps({'address': page.address}) if as_json else hint, flush=True)
        pause.wait()
    finally:
        page.close()


def _print_lines(console: Console, seen: RunStatus) -> None:
    for line in [*plain_lines(seen), *([seen.life.sentence] if seen.life.sentence else [])]:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.file.flush()
