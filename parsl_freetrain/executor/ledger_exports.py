"""Passes on what the ledger says: metrics to loggers, everything to Parsl's monitoring."""

import json
import logging
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History, Training
from parsl_freetrain.host import files
from parsl_freetrain.integrations.metric_logger import LoggedTraining, MetricLogger, OpenLog
from parsl_freetrain.journal.kept_metrics import KeptMetrics, began_in
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.journal.tables import write_sqlite

logger = logging.getLogger(__name__)

PERIOD_S = 10.0
LAST_S = 60.0  # how long the end of a run waits for loggers, in seconds
PREFIX = 'freetrain_'
MOST_OF_THE_TIME = 0.05  # maximum share of the time in which this copies


class _Thread:
    def __init__(self, period_s: float = PERIOD_S) -> None:
        self._period_s = period_s
        self._over = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        """Have this work done in a thread, unless it has begun."""
        with self._starting:
            if self._thread is None:
                name = f'FreeTrain-{type(self).__name__}'
                self._thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Do the rest; what takes long is left alone."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(LAST_S)


class MetricExport(_Thread):
    """Passes on what is known to be kept; a file beside the ledger keeps its position."""

    def start(self, loggers: Sequence[MetricLogger], ledger: Path, run: str) -> None:
        if loggers:
            self._start(self._work, loggers, ledger, run)

    def stop(self) -> None:
        """Pass on the rest and close the loggers; one that takes long is left alone."""
        super().stop()
        if self._thread is not None and self._thread.is_alive():
            logger.warning(
                'A logger has not taken all metrics within %.0f s; the next run of the workflow '
                'goes on with the rest.',
                LAST_S,
            )

    def _work(self, loggers: Sequence[MetricLogger], ledger: Path, run: str) -> None:
        journal = Journal(ledger)
        each = [_Export(journal.path, run, one) for one in loggers]
        over = False
        while not over:
            over = self._over.wait(self._period_s)
            with suppress(BadInput):  # a damaged file is just being replaced
                history = journal.history()
                for export in each:
                    export.pass_on(history, last=over)


class _Export:
    def __init__(self, ledger: Path, run: str, destination: MetricLogger) -> None:
        self._run, self._destination = run, destination
        name = re.sub('[^A-Za-z0-9]', '', type(destination).__name__)
        self._marks = ledger.with_name(f'{ledger.name}.{name}.json')
        self._logs: dict[str, tuple[OpenLog, KeptMetrics, str]] = {}
        self._complained = False

    def pass_on(self, history: History, last: bool) -> None:
        """Pass on what is new; the ``last`` time, close everything."""
        run = next(run for run in history.runs if run.name == self._run)
        for row in run.trainers.values():
            try:
                self._pass_on(history, row)
                if last and row.name in self._logs:
                    ended = row.state in ('finished', 'failed', 'cancelled')
                    self._logs.pop(row.name)[0].close(row.state if ended else 'interrupted')
            except Exception as error:  # of the user's library; the training does not depend on it
                # From the mark on, it is tried again.
                if row.name in self._logs:
                    with suppress(Exception):
                        self._logs.pop(row.name)[0].close('interrupted')
                if not self._complained:
                    what, how = type(self._destination).__name__, type(error).__name__
                    said = '%s cannot log trainer %r now: %s: %s'
                    logger.warning(said, what, row.name, how, error)
                self._complained = True

    def _pass_on(self, history: History, row: Training) -> None:
        if row.name not in self._logs:
            self._logs[row.name] = self._open(history, row)
        log, metrics, training = self._logs[row.name]
        done = None
        try:
            for point in metrics.new(history):
                log.log(point.samples, point.at, point.metrics)
                done = point
        finally:
            if done is not None:
                marks = {**self._read_marks(), training: done.mark}
                files.replace(self._marks, json.dumps(marks).encode())

    def _open(self, history: History, row: Training) -> tuple[OpenLog, KeptMetrics, str]:
        began = began_in(history, row.name, row.run)
        first = next(run.name for run in history.runs if run.id == began)
        name = re.sub('[^A-Za-z0-9_.-]', '-', row.name)
        training = f'{name}-{first[:8]}'
        samples, number = self._read_marks().get(training, (-1, 0))
        settings = {
            'min_nodes': row.trainer.counts()[0],
            'max_nodes': row.trainer.counts()[-1],
            'mode': row.submitted.mode,
            'total_epochs': row.submitted.total_epochs,
            'total_samples': row.trainer.total_samples,
        }
        settings = {name: value for name, value in settings.items() if value is not None}
        log = self._destination.open(LoggedTraining(training, row.name, settings, samples))
        return log, KeptMetrics(row.name, began, (samples, number)), training

    def _read_marks(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._marks.read_text()))
        except (OSError, ValueError):
            return {}


class MonitoringExport(_Thread):
    """Copies a run into tables ``freetrain_trainers`` and so on of Parsl's monitoring."""

    def start(self, endpoint: str | None, ledger: Path, run: str) -> None:
        """Start copying Parsl's ``run``, unless it has begun or the endpoint (such as
        ``sqlite:///runinfo/monitoring.db``) is no SQLite file.
        """
        if endpoint is not None and endpoint.startswith('sqlite:///'):
            database = Path(endpoint.removeprefix('sqlite:///')).absolute()
            self._start(self._work, database, ledger, run)

    def _work(self, database: Path, ledger: Path, run: str) -> None:
        complained = over = False
        wait_s, journal = self._period_s, None
        while not over:
            over = self._over.wait(wait_s)
            began = time.monotonic()
            try:
                journal = journal or Journal(ledger)
                write_sqlite(journal.history(run), database, PREFIX)
                complained = False
            except (sqlite3.Error, BadInput) as error:
                # Parsl may write for a long time; no training depends on this copy.
                if not complained:
                    said = 'The ledger %s could not be copied into %s: %s'
                    logger.warning(said, ledger, database, error)
                complained = True
            wait_s = max(self._period_s, (time.monotonic() - began) / MOST_OF_THE_TIME)
