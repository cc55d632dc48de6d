"""What the scheduler said last, asked in the background: a scheduler that hangs must not stop the process that listens to nodes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from parsl_freetrain.sites.batch.commands import SchedulerSilent
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import Job, Nodes, NotUnderstood, Reservation
from parsl_freetrain.sites.batch.scheduler import Scheduler

logger = logging.getLogger(__name__)

RESERVATIONS_EVERY_S = 60.0
NEVER = float('-inf')


@dataclass(frozen=True)
class Snapshot:
    """Jobs, nodes and reservations, each with the time at which the question was asked."""

    jobs: tuple[Job, ...] = ()
    jobs_at: float = NEVER
    nodes: tuple[Nodes, ...] = ()
    nodes_at: float = NEVER
    reservations: tuple[Reservation, ...] = ()
    reservations_at: float = NEVER


class Watch:
    """Asks one question of each kind for everything, not more often than the options allow, and less often after failures.

    Parameters
    ----------
    clock
        Seconds of ``time.time()``.
    """

    def __init__(self, scheduler: Scheduler, options: BatchOptions, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._snapshot = Snapshot()
        self._not_before = NEVER
        self._failures = 0
        self.error = ''

    @property
    def failures(self) -> int:
        """How many questions in a row were not answered."""
        return self._failures

    def look(self, with_nodes: bool, newer_than: float = NEVER, wait_s: float = 2.0) -> Snapshot:
        """The last answers, after asking again if they are old.

        Parameters
        ----------
        with_nodes
            Whether nodes and reservations are needed, beside the jobs.
        newer_than
            Answers to questions asked before this time are old, whatever their age; in seconds of ``time.time()``.
        wait_s
            How long to wait for the scheduler; afterwards the old answers are given.
        """
        now = self._clock()
        with self._lock:
            seen = self._snapshot.nodes_at if with_nodes else self._snapshot.jobs_at
            # Half the interval: who asks every poll_s seconds is never told to wait for the next time.
            old = now - seen >= self._options.poll_s / 2 or seen <= newer_than
            if old and now >= self._not_before and self._thread is None:
                self._thread = threading.Thread(target=self._ask, args=(with_nodes, newer_than), name='FreeTrain-scheduler', daemon=True)
                self._thread.start()
            thread = self._thread
        if old and thread is not None:
            thread.join(wait_s)
        with self._lock:
            return self._snapshot

    def _ask(self, with_nodes: bool, newer_than: float) -> None:
        """In a thread of its own."""
        snapshot = self._snapshot
        try:
            # Jobs first: one that starts between the questions then counts twice, and never not at all.
            at = self._clock()
            if not with_nodes or snapshot.jobs_at <= newer_than or at - snapshot.jobs_at > self._options.poll_s / 4:
                snapshot = replace(snapshot, jobs=self._scheduler.jobs(), jobs_at=at)
            if with_nodes:
                if at - snapshot.reservations_at >= RESERVATIONS_EVERY_S:
                    snapshot = replace(snapshot, reservations=self._scheduler.reservations(), reservations_at=at)
                snapshot = replace(snapshot, nodes=self._scheduler.nodes(), nodes_at=at)
        except Exception as error:
            self._failed(error)
        else:
            if self._failures:
                logger.info('%s answers again', self._scheduler.label)
            self._failures, self._not_before, self.error = 0, NEVER, ''
        finally:
            with self._lock:
                self._snapshot = snapshot
                self._thread = None

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self.error = str(error)
        pause = min(self._options.poll_s * 2 ** min(self._failures - 1, 30), self._options.longest_backoff_s)
        self._not_before = self._clock() + pause
        expected = isinstance(error, (SchedulerSilent, NotUnderstood))
        logger.warning('%s did not answer, next question in %.0f s: %s', self._scheduler.label, pause, error, exc_info=not expected)
