"""One job at a time in a thread beside the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs a job in a thread, which may be cut off; the next call raises its exception."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then start this one. Raises the previous job's exception."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for the job, at most ``limit_s`` seconds, and raise its exception if it has one."""
        if self._thread is not None:
            self._thread.join(limit_s)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # the main thread raises it
            self._error = error
