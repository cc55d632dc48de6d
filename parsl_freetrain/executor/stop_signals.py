"""SIGTERM and SIGHUP end the submitting program as Ctrl-C does: trainers save, and blocks end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

SIGNALS = signal.SIGTERM, signal.SIGHUP


class StopSignals:
    """The first of these signals raises SystemExit, unless the program handles or ignores it."""

    def __init__(self) -> None:
        self._pid, self._ending = os.getpid(), False

    def begin(self) -> None:
        """Has no effect in another thread than the main one."""
        with suppress(ValueError):
            for one in SIGNALS:
                if signal.getsignal(one) is signal.SIG_DFL:
                    signal.signal(one, self._end_by)

    def end(self) -> None:
        with suppress(ValueError):
            for one in SIGNALS:
                if signal.getsignal(one) == self._end_by:
                    signal.signal(one, signal.SIG_DFL)

    def _end_by(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked from it
            os._exit(128 + number)
        if not self._ending:
            self._ending = True
            raise SystemExit(128 + number)
