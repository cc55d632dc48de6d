"""The live view of a run in the terminal of its own program, from a thread beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from parsl_freetrain.cli.live.view import LiveView, Screen, plain_lines
from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal


def run_live(
    path: str | Path,
    stop: threading.Event,
    console: Console,
    allocator: Allocator | None = None,
    *,
    refresh_s: float = 0.5,
    plain_s: float = 10.0,
    clock: Callable[[], float] = time.time,
) -> None:
    """Show a ledger until ``stop`` is set; the ledger need not exist yet. On a terminal the view is
    redrawn every ``refresh_s`` seconds. Elsewhere one plain line per trainer is printed every
    ``plain_s`` seconds, and at the end. Raises BadInput if the file is no ledger or too new.
    """
    journal = _wait_for(Path(path), stop, refresh_s)
    if journal is None:
        return
    view = LiveView(journal, allocator)
    if not console.is_terminal:
        while not stop.wait(plain_s):
            _print_lines(console, plain_lines(view.snapshot(clock())))
        _print_lines(console, plain_lines(view.snapshot(clock())))
        return
    with Live(
        Screen(view.snapshot(clock())),
        console=console,
        auto_refresh=False,
        vertical_overflow='ellipsis',
    ) as live:
        while not stop.wait(refresh_s):
            live.update(Screen(view.snapshot(clock())), refresh=True)
        live.update(Screen(view.snapshot(clock())), refresh=True)


def _wait_for(path: Path, stop: threading.Event, every_s: float) -> Journal | None:
    while True:
        try:
            return Journal(path, keep_progress=False)
        except BadInput:
            # A new ledger is empty for a moment.
            if path.exists() and path.stat().st_size > 0:
                raise
        if stop.wait(every_s):
            return None


def _print_lines(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)
