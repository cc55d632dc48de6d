"""The scheduler's last answers, asked for in a thread of its own: a scheduler that hangs must not
stop the process that listens to nodes.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.clocks import Backoff, ClockSteps
from parsl_freetrain.sites.batch import records as rc
from parsl_freetrain.sites.batch.demand import waits
from parsl_freetrain.sites.batch.node_windows import as_jobs_say, freed, held
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.scheduler import Scheduler
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerSilent
from parsl_freetrain.sites.batch.shared_answers import shared

logger = logging.getLogger(__name__)

RESERVATIONS_EVERY_S = NODES_EVERY_S = 120.0
"""Maximum time between two questions about reservations (which are asked for at once when the first
job begins to wait), and about nodes; in between, jobs tell which nodes are free.
"""
RESERVATIONS_WAITING_S, NODES_WAITING_S = 60.0, 15.0
"""The same while jobs of others wait for nodes that blocks hold."""
QUEUE_EVERY_S = 600.0  # between looks at whether the queue starts jobs; NODES_EVERY_S if not
LONGEST_PAUSE_S = 10.0
"""Longest time until the next question after failures while blocks are open, or ``poll_s`` if that
is longer: jobs of others may wait for their nodes.
"""
NEVER = float('-inf')


@dataclass(frozen=True)
class QueueSnapshot:
    """Jobs, nodes, reservations, when each was asked; since when others' jobs wait."""

    jobs: tuple[rc.BatchJob, ...] = ()
    jobs_at: float = NEVER
    nodes: tuple[rc.Nodes, ...] = ()
    nodes_at: float = NEVER
    reservations: tuple[rc.NodeReservation, ...] = ()
    reservations_at: float = NEVER
    waiting_since: float = NEVER

    @property
    def reservations_old(self) -> bool:
        """Whether reservations may have been made with a job that waits, whose nodes they say."""
        return self.reservations_at < self.waiting_since


class QueueWatch:
    """Asks one question of each kind for everything, no more often than the options allow, and less
    often after failures; ``poll_s``, ``nodes_s``, ``reservations_s`` and ``blocks_open`` may be
    changed at any time. ``error``: why the last question was not answered; empty if it was.
    """

    def __init__(
        self, scheduler: Scheduler, options: BatchOptions, clock: Callable[[], float]
    ) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._snapshot = QueueSnapshot()
        self._jobs_answered = self._nodes_answered = NEVER
        self._not_before = NEVER
        self._steps = ClockSteps(clock)
        self._backoff = Backoff(options.poll_s, options.longest_backoff_s)
        self.error = ''
        self.poll_s = options.poll_s
        self.blocks_open = False
        self.nodes_s, self.reservations_s = 0.0, RESERVATIONS_EVERY_S
        self._nodes: tuple[rc.Nodes, ...] = ()  # as they were said, and which jobs have had since
        self._nodes_said, self._had = NEVER, frozenset[str]()
        self.starts_jobs, self._queue_at = True, math.inf  # until it is looked up
        self._notes = frozenset[str]()  # that were said about it

    def queue(self) -> rc.Partition:
        """The queue, from the scheduler itself; BadInput, SchedulerSilent."""
        self._queue_at, queue = self._clock(), self._scheduler.queue()
        self.starts_jobs = queue.up
        for note in queue.notes - self._notes:
            logger.warning('The queue %r %s', queue.name, note)
        self._notes = queue.notes
        return queue

    def _look_at_queue(self) -> None:
        """It may be stopped for a maintenance, and be started after it."""
        if self._clock() - self._queue_at < (QUEUE_EVERY_S if self.starts_jobs else NODES_EVERY_S):
            return
        try:
            self.queue()
        except BadInput as error:  # it takes none: what is held is given back all the same
            logger.warning('There are no holes: %s', error)
            self.starts_jobs = False

    @property
    def last(self) -> QueueSnapshot:
        return self._snapshot

    @property
    def failures(self) -> int:
        """The number of questions in a row that were not answered."""
        return self._backoff.failures

    def look(
        self, with_nodes: bool, newer_than: float = NEVER, wait_s: float = 2.0
    ) -> QueueSnapshot:
        """The last answers, after asking again if they are old. ``with_nodes``: nodes and
        reservations, too; ``newer_than``: older ones count as old; ``wait_s``: for the scheduler,
        at most.
        """
        self.ask(with_nodes, newer_than)
        with self._lock:
            thread = self._thread if self._old(with_nodes, newer_than) else None
        if thread is not None:
            thread.join(wait_s)
        with self._lock:
            return self._snapshot

    def ask(
        self, with_nodes: bool, newer_than: float = NEVER, done: Callable[[], None] | None = None
    ) -> bool:
        """Ask in a thread if answers are old, then call ``done``; whether it asks."""
        with self._lock:
            if self._steps.set_back_s():  # the times of all answers are still to come
                self._jobs_answered = self._nodes_answered = self._not_before = NEVER
                self._nodes_said, self._queue_at = NEVER, min(self._queue_at, self._clock())
            paused = self._thread is not None or self._clock() < self._not_before
            if paused or not self._old(with_nodes, newer_than):
                return False
            arguments = with_nodes, newer_than, done
            name = 'FreeTrain-scheduler'
            self._thread = threading.Thread(None, self._ask, name, arguments, daemon=True)
            self._thread.start()
            return True

    def _old(self, with_nodes: bool, newer_than: float) -> bool:
        if with_nodes and self._snapshot.reservations_old:
            return True
        seen = self._snapshot.nodes_at if with_nodes else self._snapshot.jobs_at
        answered = self._nodes_answered if with_nodes else self._jobs_answered
        # Half of it, so that a caller who comes every poll_s seconds always gets a new answer.
        return self._clock() - answered >= self.poll_s / 2 or seen <= newer_than

    def _ask(self, with_nodes: bool, newer_than: float, done: Callable[[], None] | None) -> None:
        snapshot = self._snapshot
        jobs_answered, nodes_answered = self._jobs_answered, self._nodes_answered
        try:
            # Jobs first: one that starts in between counts twice, which is harmless, and not never.
            at = self._clock()
            old = snapshot.jobs_at <= newer_than or at - jobs_answered > self.poll_s / 4
            if old or not with_nodes:
                # Other runs' answers will do if they are newer than half the time between
                # questions; the first question is asked in any case.
                least = math.inf if jobs_answered == NEVER else at - self.poll_s / 2
                with shared(self._clock, max(newer_than, least)) as told:
                    jobs = self._scheduler.jobs()
                at = min(at, told.asked_at)
                since = snapshot.waiting_since if snapshot.waiting_since != NEVER else at
                since = since if any(waits(job, frozenset()) for job in jobs) else NEVER
                snapshot = replace(snapshot, jobs=jobs, jobs_at=at, waiting_since=since)
                # What was asked beside takes the place of the next questions.
                jobs_answered = self._clock() + max(0, told.questions - 1) * self.poll_s
            if with_nodes:
                self._look_at_queue()
                late = at - snapshot.reservations_at >= self.reservations_s
                if late or snapshot.reservations_old:
                    with shared(self._clock, at):
                        said = self._scheduler.reservations()
                    snapshot = replace(snapshot, reservations=said, reservations_at=at)
                if at - self._nodes_said >= min(self.nodes_s, self._scheduler.nodes_every_s):
                    with shared(self._clock, at):
                        self._nodes, self._nodes_said = self._scheduler.nodes(), at
                    self._had = frozenset()
                self._had |= held(snapshot.jobs)
                nodes = as_jobs_say(self._nodes, freed(self._had, snapshot.jobs))
                snapshot = replace(snapshot, nodes=nodes, nodes_at=at)
                nodes_answered = self._clock()
        except Exception as error:
            self._failed(error)
        else:
            if self._backoff.failures:
                logger.info('%s answers again', self._scheduler.label)
            self._not_before, self.error = NEVER, ''
            self._backoff.reset()
        finally:
            with self._lock:
                self._snapshot = snapshot
                self._jobs_answered, self._nodes_answered = jobs_answered, nodes_answered
                self._thread = None
            if done is not None:
                done()

    def _failed(self, error: Exception) -> None:
        self.error = str(error)
        pause = self._backoff.failed()
        if self.blocks_open:
            # Less half an interval, so that a caller who comes every poll_s seconds is not late.
            pause = min(pause, max(self.poll_s, LONGEST_PAUSE_S) - self.poll_s / 2)
        self._not_before = self._clock() + pause
        expected = isinstance(error, (SchedulerSilent, rc.NotUnderstood))
        said = '%s did not answer, next question in %.0f s: %s'
        logger.warning(said, self._scheduler.label, pause, error, exc_info=not expected)
