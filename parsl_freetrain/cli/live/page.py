"""The report of a run as a page that is written anew while the run goes on."""

from __future__ import annotations

import math
import threading
import time
from html import escape

from parsl_freetrain.core.allocation.solvers.dynamic_program import DpAllocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.figures import figures
from parsl_freetrain.report.names import chosen
from parsl_freetrain.report.page import report_page

SHARE = 10  # of the time, at most one part in so many goes into writing the page


class LivePage:
    """The newest page about a run (None: the newest run) of the ledger, for all browsers. It is
    written every ``every_s`` seconds, or less often if that takes long.
    """

    def __init__(self, journal: Journal, run: str | None, every_s: float) -> None:
        self._journal, self._run, self._every_s = journal, run, every_s
        self._lock = threading.Lock()
        self._next, self._text, self._over = -math.inf, '', False
        self._write()

    def newest(self) -> tuple[str, int | None]:
        """The page, or why there is none; and seconds until the next one (None: no other)."""
        with self._lock:
            if not self._over and time.monotonic() >= self._next:
                try:
                    self._write()
                except (BadInput, OSError) as error:
                    return escape(f'The ledger cannot be read now: {error}'), 5
            wait_s = max(1, math.ceil(self._next - time.monotonic()))
            return self._text, None if self._over else wait_s

    def _write(self) -> None:
        begun = time.monotonic()
        history = self._journal.history()
        one = chosen(history, self._journal.path, self._run)
        found = figures(history.of(one.name), time.time(), DpAllocator())
        self._text = report_page(found)
        self._over = found.status.life.state in ('ended', 'died')
        self._next = begun + max(self._every_s, SHARE * (time.monotonic() - begun))
