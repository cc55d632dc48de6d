"""The open blocks of one site, compared with what the scheduler says about its queue."""

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain

from parsl.jobs.states import JobStatus

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.types import NodeDemand, NodeOffer
from parsl_freetrain.host.clocks import Backoff, ClockSteps
from parsl_freetrain.sites.batch import queue_watch as qw
from parsl_freetrain.sites.batch.block_shape import Output, is_block
from parsl_freetrain.sites.batch.block_table import BatchBlock, BlockTable
from parsl_freetrain.sites.batch.demand import Needs, StalledJobs, could_use, needs, reserved, waits
from parsl_freetrain.sites.batch.node_windows import HOLDING, OfferLog, held, windows
from parsl_freetrain.sites.batch.options import BatchOptions
from parsl_freetrain.sites.batch.records import BatchJob, JobState, NotUnderstood, warn_once
from parsl_freetrain.sites.batch.scheduler import NoHistory, Scheduler, Shrinking
from parsl_freetrain.sites.batch.scheduler_commands import SchedulerSilent, own_name

logger = logging.getLogger(__name__)

HISTORY_S = 1.0
"""How long the records of jobs that are over are waited for, in seconds; what comes later is seen
at the next look.
"""
LONGEST_CANCEL_S = 300.0  # maximum seconds between two tries to cancel jobs that nobody needs


class BlockTracker:
    """Follows blocks from their submission to their end, and cancels those that are late.
    ``unanswered``: names of submissions without an answer; their jobs are cancelled when seen.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        options: BatchOptions,
        clock: Callable[[], float],
        unanswered: set[str],
    ) -> None:
        self._scheduler, self._options, self._clock = scheduler, options, clock
        self._unanswered = unanswered
        self.watch = qw.QueueWatch(scheduler, options, clock)
        self._wanted = scheduler.wanted()
        self.user = own_name()
        self._lock, self._playing = threading.Lock(), threading.Lock()
        self._blocks = BlockTable()
        self._stalled = StalledJobs(4 * options.start_s)
        self._needs: tuple[qw.QueueSnapshot, Needs] = (qw.QueueSnapshot(), Needs())
        self._offers = OfferLog(options.poll_s)
        self.taken_in = qw.NEVER  # when the question was asked whose answer was last taken in
        self._waiting = False
        self.held: dict[str, tuple[str, ...]] = {}
        self._leaving: set[str] = set()  # jobs that end themselves
        self._looked: set[bool] = set()  # whether at nodes too, since it was last asked beside
        self._changed = qw.NEVER  # answers to older questions do not show what we did
        self._next_history = qw.NEVER
        self._history: threading.Thread | None = None
        self._next_cancel = qw.NEVER
        self._steps = ClockSteps(clock)
        self._backoff = Backoff(options.poll_s, LONGEST_CANCEL_S)

    def add(self, blocks: Collection[BatchBlock]) -> None:
        with self._lock:
            for block in blocks:
                self._blocks.add(block)
            self._note_change()

    def remove(self, job_id: str) -> None:
        """A block is over, and its nodes can be offered once the scheduler says so."""
        with self._lock:
            if self._blocks.remove(job_id):
                self._note_change()

    def _note_change(self) -> None:
        self._changed = self._clock()
        self.watch.blocks_open = bool(self._blocks.ids())

    def ids(self) -> frozenset[str]:
        with self._lock:
            return self._blocks.ids()

    def waiting(self) -> list[BatchBlock]:
        with self._lock:
            return self._blocks.waiting()

    def end_of(self, job_id: str) -> float | None:
        """When the scheduler ends a running block; None if it does not, or while unknown."""
        with self._lock:
            return self._blocks.end_of(job_id)

    def offers(self, since: float, until: float) -> tuple[NodeOffer, ...]:
        with self._lock:
            return self._offers.between(since, until)

    @property
    def start_s(self) -> float:
        """Seconds that the scheduler takes to start a job: as measured, or the options if less."""
        return self._blocks.start_s(self._options.start_s)

    @property
    def poll_s(self) -> float:
        """Seconds until the next question: less while others' jobs wait and blocks hold nodes."""
        return self.watch.poll_s

    # --- what others wait for

    def needs(self, snapshot: qw.QueueSnapshot) -> Needs:
        with self._playing:
            if snapshot is not self._needs[0]:
                with self._lock:
                    ours, leaving, now = self._blocks.ids(), set(self._leaving), snapshot.jobs_at
                jobs = [
                    replace(job, state=JobState.ENDING)
                    if job.job_id in leaving and job.state is JobState.RUNNING
                    else job
                    for job in snapshot.jobs
                ]
                stalled = self._stalled
                known = stalled.ignored(now), stalled.unsuitable(), stalled.unwilling(now)
                found = needs(snapshot.nodes, jobs, snapshot.reservations, ours, now, *known)
                pending = {job.job_id for job in snapshot.jobs if waits(job, ours)}
                up = chain(*(n.names for n in snapshot.nodes if not n.broken))
                blocks = (job for job in jobs if job.job_id in ours or is_block(job.name))
                beside = frozenset(up) - held(blocks)
                self._stalled.note(found.served, found.lacking, pending, beside, now, found.asked)
                self._needs = snapshot, found
            return self._needs[1]

    def must_look(self) -> bool:
        """Whether nodes may have to be given back, by the last answers."""
        if self._waiting or not self.held:
            return self._waiting
        last = self.watch.last
        old = self._clock() - last.reservations_at >= qw.RESERVATIONS_EVERY_S
        return old or bool(self.reserved(last))

    def reserved(self, snapshot: qw.QueueSnapshot) -> tuple[NodeDemand, ...]:
        jobs = [job for job in snapshot.jobs if job.job_id not in self._leaving]
        by_s = self._clock() + self._options.margin_s
        return reserved(jobs, snapshot.reservations, snapshot.nodes, self.ids(), by_s)

    # --- the scheduler's answers

    def ask(self, done: Callable[[], None]) -> bool:
        """Ask in a thread, which calls ``done``; False: nothing to ask."""

        def answered() -> None:
            try:
                last = self.watch.last
                if not self.watch.failures and last.nodes_at >= last.jobs_at > qw.NEVER:
                    self.needs(last)
            finally:
                done()

        looked, self._looked = self._looked, set()
        return bool(looked) and self.watch.ask(True in looked, self._changed, answered)

    def snapshot(self) -> qw.QueueSnapshot | None:
        """Queue and nodes now; None if the scheduler is silent or it is played through."""
        snapshot = self._look(with_nodes=True)
        slow_s = 3 * self._options.poll_s + self._options.command_s  # an answer may take that long
        fresh = snapshot.nodes_at >= max(self._changed, self._clock() - slow_s)
        fresh = fresh and not snapshot.reservations_old
        return snapshot if fresh and not (self.watch.failures or self._playing.locked()) else None

    def first_snapshot(self) -> qw.QueueSnapshot:
        """As :meth:`snapshot`, after waiting for it. FreeTrainError without an answer."""
        snapshot = self.watch.look(with_nodes=True, wait_s=5 * self._options.command_s)
        if snapshot.nodes_at == qw.NEVER:
            why = self.watch.error or 'it takes too long'
            raise FreeTrainError(f'{self._scheduler.label} does not answer: {why}.')
        return snapshot

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """As last seen; UNKNOWN after ``unreachable_s`` seconds of silence."""
        snapshot = self._look(with_nodes=False)
        self._ask_history()
        self._delete(snapshot)
        now = self._clock()
        silent = self.watch.failures > 0 and now - self.taken_in > self._options.unreachable_s
        silence = self.watch.error if silent else ''
        with self._lock:
            return [self._blocks.status(job_id, now, silence) for job_id in job_ids]

    def _look(self, with_nodes: bool) -> qw.QueueSnapshot:
        self._looked.add(with_nodes)
        if self._steps.set_back_s():
            self._changed = min(self._changed, self._clock())
            self._next_history = self._next_cancel = qw.NEVER
        snapshot = self.watch.look(with_nodes, self._changed)
        if snapshot.jobs_at not in (qw.NEVER, self.taken_in):
            self.taken_in = snapshot.jobs_at
            with self._lock:
                self._blocks.take_in(snapshot.jobs, snapshot.jobs_at)
                self._note_offers(snapshot)
                self._note_waiting(snapshot.jobs, snapshot.jobs_at)
            own = (job for job in snapshot.jobs if job.user == self.user)
            strays = [job for job in own if job.name in self._unanswered]
            if self._try_to_cancel([job.job_id for job in strays if not job.state.is_over]):
                self._unanswered -= {job.name for job in strays}
        return snapshot

    def _note_waiting(self, jobs: Sequence[BatchJob], at: float) -> None:
        ours = self._blocks.ids()
        self.held = {
            job.job_id: job.names
            for job in jobs
            if job.job_id in ours and job.names and job.state in HOLDING
        }
        self._waiting = bool(self.held) and could_use(self.watch.last.nodes, jobs, ours)
        slow, fast = self._options.poll_s, self._options.fast_poll_s
        self.watch.poll_s = fast if self._waiting else slow
        # A reservation decides which nodes of ours serve a job, and may keep a block from starting.
        late = any(b.submitted_s < at - self.start_s for b in self._blocks.waiting())
        self.watch.nodes_s = min(qw.NODES_EVERY_S, 10 * slow)
        self.watch.reservations_s = qw.RESERVATIONS_EVERY_S
        if self._waiting or late:
            self.watch.nodes_s = min(qw.NODES_WAITING_S, 4 * fast)
            self.watch.reservations_s = min(qw.RESERVATIONS_WAITING_S, 15 * fast)

    def _note_offers(self, snapshot: qw.QueueSnapshot) -> None:
        ours = self._blocks.ids()
        names = {name for job in snapshot.jobs if job.job_id in ours for name in job.names}
        if snapshot.nodes_at >= snapshot.jobs_at:
            names |= self.usable(snapshot, ours).keys()
        self._offers.note(snapshot.jobs_at, names)

    def usable(
        self, snapshot: qw.QueueSnapshot, ours: frozenset[str], now: float | None = None
    ) -> dict[str, float]:
        """Until when each node can be had, from ``now`` on, or when the answer was given."""
        at = snapshot.jobs_at if now is None else now
        answers = snapshot.nodes, snapshot.jobs, snapshot.reservations
        return windows(*answers, self._wanted, ours, at)

    def _ask_history(self) -> None:
        """Ask for the ends of jobs gone from the queue, in a thread: a database may be slow."""
        now = self._clock()
        with self._lock:
            missing = self._blocks.missing()
        asked = self._history is not None and self._history.is_alive()
        if asked or not missing or now < self._next_history:
            return
        self._next_history = now + self._scheduler.history_every_s
        self._history = threading.Thread(
            target=self._take_history, args=(missing,), name='FreeTrain-history', daemon=True
        )
        self._history.start()
        self._history.join(HISTORY_S)

    def _take_history(self, missing: dict[str, Output]) -> None:
        try:
            states = self._scheduler.history(missing)
        except (SchedulerSilent, NotUnderstood, NoHistory) as error:
            logger.info('%s says nothing of %s: %s', self._scheduler.label, list(missing), error)
            self._next_history = math.inf if isinstance(error, NoHistory) else self._next_history
            return
        with self._lock:
            self._blocks.take_in_history(states)

    # --- cancellation

    def shrink(self, scheduler: Shrinking, job_id: str, leave: Collection[str]) -> None:
        """Take nodes away from a running block. Raises FreeTrainError if the scheduler does not."""
        names = self.held.get(job_id, ())
        keep = [name for name in names if name not in leave]
        scheduler.shrink(job_id, keep, [name for name in names if name in leave])
        with self._lock:
            self._changed = self._clock()

    def leaving(self, job_ids: Sequence[str]) -> None:
        with self._lock:
            self._leaving |= set(job_ids)
            self._changed = self._clock()

    def cancel(self, job_ids: Sequence[str]) -> None:
        self._cancel(job_ids, cancelled=True)

    def _cancel(self, job_ids: Sequence[str], **why: bool) -> None:
        self._scheduler.cancel(job_ids)
        with self._lock:
            self._blocks.mark(job_ids, **why)
            self._leaving -= set(job_ids)
            self._changed = self._clock()

    def _delete(self, snapshot: qw.QueueSnapshot) -> None:
        """Cancel blocks that have not started in time, and those whose nodes were taken."""
        before = min(snapshot.jobs_at, snapshot.nodes_at) - self.start_s
        with self._lock:
            late = self._blocks.late(self._clock())
            if any(b.submitted_s < before for b in self._blocks.waiting()):
                usable = self.usable(snapshot, self._blocks.ids())
                lengths_s = [end - snapshot.jobs_at for end in usable.values()]
                shortest_s = max(self._scheduler.step_s, self._options.shortest_s)
                shortest_s += self.start_s + self._options.limit_margin_s
                late += self._blocks.stranded(lengths_s, shortest_s, before)
            at, now_needed = self._needs
            if now_needed.lacking and at.jobs_at >= before:
                # What is given back must not become one of these.
                late += [b.job_id for b in self._blocks.waiting() if not b.seen.withdrawn]
            taken = self._blocks.taken(self._options.requeue)
        for job in snapshot.jobs:
            if job.job_id in late and (job.blocked or job.state is JobState.HELD) and job.reason:
                warn_once(f'A block did not start: {self._scheduler.label} says {job.reason}')
        if not self.watch.failures:
            self._try_to_cancel(list(dict.fromkeys(late)), withdrawn=True)
            self._try_to_cancel(taken, taken=True)

    def _try_to_cancel(self, job_ids: Sequence[str], **why: bool) -> bool:
        """False: try again, less and less often while the scheduler does not answer."""
        if not job_ids:
            return True
        if self._clock() < self._next_cancel:
            return False
        try:
            self._cancel(job_ids, **why)
        except SchedulerSilent as error:
            self._next_cancel = self._clock() + self._backoff.failed()
            logger.warning('Jobs %s are not needed: cannot cancel: %s', job_ids, error)
            return False
        self._backoff.reset()
        return True
