"""One job at a time beside the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs a job in a thread; what the job raises is raised where it is next asked about, once.

    The thread dies with the process: a job must bear to be cut off anywhere.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the job before, then start this one; raises what the one before has raised."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what a job that is over has raised."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Wait until no job runs; raises what it has raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # whatever it is, it is for the main thread
            self._error = error
