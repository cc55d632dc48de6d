"""A machine with a batch scheduler as a site: looks, submits, watches and gives back."""

from __future__ import annotations

import logging
import math
import os
import pwd
import secrets
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from parsl.jobs.states import JobStatus
from parsl.providers.base import ExecutionProvider

from parsl_freetrain.core.errors import BadInput, FreeTrainError
from parsl_freetrain.core.words import BlockRequest, Hole
from parsl_freetrain.sites.batch.adoption import block_from, found_from
from parsl_freetrain.sites.batch.book import Block, Book
from parsl_freetrain.sites.batch.checks import check_request, within
from parsl_freetrain.sites.batch.commands import Refused, SchedulerSilent
from parsl_freetrain.sites.batch.holes import OnTheWay, holes, windows
from parsl_freetrain.sites.batch.life import Seen, is_over, life_of
from parsl_freetrain.sites.batch.offers import OfferLog
from parsl_freetrain.sites.batch.options import BatchOptions, given_options
from parsl_freetrain.sites.batch.provider import BatchProvider, write_private
from parsl_freetrain.sites.batch.records import Job, NotUnderstood, Partition
from parsl_freetrain.sites.batch.scheduler import NoHistory, Scheduler
from parsl_freetrain.sites.batch.shape import BlockShape, Place, is_block_of, job_name, shape_for
from parsl_freetrain.sites.batch.watch import NEVER, Snapshot, Watch
from parsl_freetrain.sites.protocols import FoundBlock, HoleGone, Offer

logger = logging.getLogger(__name__)


class BatchSite(ABC):
    """One queue of a machine with a batch scheduler; each scheduler has a subclass that only names its parts.

    Parameters
    ----------
    options
        The site config; alternatively its settings as keyword arguments.
    run
        Names this run's jobs, so that they are found again; default: what the executor says, else drawn at random.
    clock
        Wall-clock time in seconds.
    settings
        As the subclass's ``options_type``.

    Raises
    ------
    BadInput
        A setting that cannot be used.
    """

    name: str
    job_variable: str
    options_type: type[BatchOptions]

    def __init__(self, options: BatchOptions | None = None, run: str | None = None, clock: Callable[[], float] = time.time,
                 **settings: object) -> None:
        self.options = given_options(self.options_type, type(self).__name__, options, settings)
        scheduler = self.scheduler(clock)
        self.run = run or secrets.token_hex(4)
        self._named = run is not None
        self.poll_s = self.options.poll_s
        self.spans_blocks = self.options.spans_blocks
        self.interface: str | None = self.options.interface
        self._scheduler = scheduler
        self.client = scheduler.client
        self._clock = clock
        self._watch = Watch(scheduler, self.options, clock)
        self._wanted = scheduler.wanted()
        self._user = _user()
        self._lock = threading.Lock()
        self._partition: Partition | None = None
        self._closed = False
        self._book = Book()
        self._prepared: tuple[BlockShape, float] | None = None
        self._places: dict[str, Place] = {}
        self._unsure: set[str] = set()          # names of submissions without an answer
        self._taken_in = NEVER                  # jobs were last compared with this answer
        self._changed = NEVER                   # answers to older questions do not show what we did
        self._next_submission = NEVER
        self._next_history = NEVER
        self._offers = OfferLog(3 * self.poll_s)

    @abstractmethod
    def scheduler(self, clock: Callable[[], float]) -> Scheduler:
        """What asks, submits and cancels, made from ``self.options``."""

    def __repr__(self) -> str:
        said = ', '.join(f'{name}={getattr(self.options, name)!r}' for name in sorted(self.options.model_fields_set))
        return f'{type(self).__name__}({said}, run={self.run!r})'

    # --- beginning and end

    def start(self) -> None:
        """Look the queue up, and ask whether a block would be accepted.

        Raises
        ------
        BadInput
            There is no such scheduler, or the site config asks for what the machine does not give.
        FreeTrainError
            The scheduler does not answer.
        """
        if self._partition is not None:
            return
        partition = self._look_up()
        shortest_s = math.ceil(partition.shortest_s)
        shape = BlockShape(partition.least_nodes, shortest_s, shortest_s)
        with tempfile.TemporaryDirectory(prefix='freetrain-') as folder:
            script = Path(folder) / 'test.sh'
            write_private(script, self._scheduler.render(shape, self._place(Path(folder), 'test'), 'true'), self._scheduler.script_mode)
            try:
                self._scheduler.test(script)
            except Refused as error:
                raise BadInput(f'{self._scheduler.label} would refuse every block in {partition.name!r}: {error}; '
                               f'change the site config.') from None
        self._partition = partition

    def _look_up(self) -> Partition:
        return within(self._scheduler.queue(), self.options, self._scheduler.step_s)

    def close(self) -> None:
        """No holes from now on."""
        self._closed = True

    def default_provider(self) -> ExecutionProvider:
        """The provider that belongs to this site."""
        return BatchProvider(self)

    # --- holes

    def holes(self) -> tuple[Hole, ...]:
        """What can be had now; nothing while the scheduler is silent, and while as many blocks wait as may."""
        partition = self._partition
        if partition is None or self._closed:
            return ()
        snapshot = self._look(with_nodes=True)
        now = self._clock()
        with self._lock:
            waiting, ours = self._book.waiting(), self._book.ids()
        may_wait = min(self.options.max_waiting, partition.most_waiting or self.options.max_waiting)
        old_s = 3 * self.poll_s + self.options.command_s    # an answer may take that long
        if (self._watch.failures or now - snapshot.nodes_at > old_s or snapshot.nodes_at < self._changed or len(waiting) >= may_wait
                or now < self._next_submission):
            return ()
        return self._holes(snapshot, partition, now, waiting, ours)

    def holes_now(self) -> tuple[Hole, ...]:
        """What can be had now, whatever is open and without a check of the site config; for the command line.

        Raises
        ------
        BadInput
            No such scheduler, or no such queue.
        FreeTrainError
            The scheduler does not answer.
        """
        partition = self._partition or self._look_up()
        snapshot = self._watch.look(with_nodes=True, wait_s=5 * self.options.command_s)
        if snapshot.nodes_at == NEVER:
            raise FreeTrainError(f'{self._scheduler.label} does not answer: {self._watch.error or "it takes too long"}.')
        return self._holes(snapshot, partition, self._clock(), [], frozenset())

    def _holes(self, snapshot: Snapshot, partition: Partition, now: float, waiting: list[Block], ours: frozenset[str]) -> tuple[Hole, ...]:
        until = windows(snapshot.nodes, snapshot.jobs, snapshot.reservations, self._wanted, ours, now)
        return holes(until, [OnTheWay(block.nodes, block.latest_end_s) for block in waiting], partition, now,
                     self.options.margin_s, partition.shortest_s + self.options.start_s)

    def offers(self, since: float, until: float) -> tuple[Offer, ...]:
        """As far as looks at the machine tell."""
        with self._lock:
            return self._offers.between(since, until)

    # --- submission

    def prepare(self, provider: ExecutionProvider, request: BlockRequest) -> None:
        """Work out the block that fits the request; the next submission is that."""
        if not isinstance(provider, BatchProvider) or provider.site is not self:
            raise BadInput(f'{type(self).__name__} submits only through its own provider, and not through {type(provider).__name__}; '
                           f'leave out provider= in BackfillProvider.')
        if self._partition is None:
            raise BadInput(f'{type(self).__name__}: a block was asked for before the site was started.')
        check_request(request, self._partition)
        now = self._clock()
        if now < self._next_submission:
            raise HoleGone(f'{type(self).__name__}: one submission at a time, the next in {self._next_submission - now:.1f} s; '
                           f'look at the holes again.')
        provider.nodes_per_block = request.nodes
        self._prepared = self._shape(request, self._partition, now), now

    def _shape(self, request: BlockRequest, partition: Partition, now: float) -> BlockShape:
        return shape_for(request.nodes, request.walltime_s, request.names, self.options, partition.longest_s, now,
                         self._scheduler.step_s, partition.shortest_s)

    def submit(self, folder: Path, command: str, block: str, worker_init: str) -> str:
        """Submit what was prepared; its script and output go to ``folder``. The job's id.

        Raises
        ------
        FreeTrainError
            The scheduler refused it, or did not answer.
        """
        if self._prepared is None or self._partition is None:
            raise FreeTrainError(f'{type(self).__name__}: a submission needs to be prepared first; use it through BackfillProvider.')
        shape, _ = self._prepared
        place = self._place(folder, block)
        script = folder / f'{place.name}.sh'
        write_private(script, self._scheduler.render(shape, place, command, worker_init), self._scheduler.script_mode)
        for path in (place.stdout, place.stderr):
            write_private(Path(path), '')
        self._next_submission = self._clock() + self.options.submit_every_s
        try:
            job_id = self._scheduler.submit(script)
        except SchedulerSilent:
            self._unsure.add(place.name)
            raise
        self._places[job_id] = place
        return job_id

    def _place(self, folder: Path, block: str) -> Place:
        name = job_name(self.run, f'{block}.{secrets.token_hex(3)}')
        return Place(name, str(folder / f'{name}.out'), str(folder / f'{name}.err'))

    def preview(self, request: BlockRequest, command: str, folder: Path, block: str, worker_init: str) -> tuple[BlockShape, str]:
        """The block that would be submitted for a request now, and its batch script; nothing is written or sent.

        Raises
        ------
        BadInput
            No such scheduler, no such queue, or a request that it can never meet.
        """
        partition = self._partition or self._look_up()
        check_request(request, partition)
        shape = self._shape(request, partition, self._clock())
        return shape, self._scheduler.render(shape, self._place(folder, block), command, worker_init)

    def submitted(self, job_id: str, request: BlockRequest) -> None:
        """The block just prepared is this job."""
        if self._prepared is None:
            return
        (shape, now), self._prepared = self._prepared, None
        opts = self.options
        if shape.deadline is not None:
            start_by, latest = float(shape.deadline - shape.least_s), float(shape.deadline)
        else:
            start_by = now + opts.withdraw_s
            latest = start_by + shape.walltime_s
        with self._lock:
            self._book.add(Block(job_id, shape.nodes, now, start_by, latest, self._places.pop(job_id)))
            self._changed = self._clock()

    def gone(self, job_id: str) -> None:
        """The job's nodes can be offered again once the scheduler says so."""
        with self._lock:
            if self._book.remove(job_id):
                self._changed = self._clock()

    # --- adoption

    def identify(self, run: str) -> None:
        """Name this run's jobs, unless that was done already."""
        if not self._named:
            self.run, self._named = run, True

    def adopt(self) -> tuple[FoundBlock, ...]:
        """Jobs of this run that an earlier process has submitted, and that are not over; they are blocks of this process now.

        Raises
        ------
        FreeTrainError
            The scheduler does not answer.
        """
        now = self._clock()
        found = [job for job in self.find_blocks() if job.job_id not in self._book.ids()]
        with self._lock:
            for job in found:
                self._book.add(block_from(job, self.options, now))
        return tuple(found_from(job) for job in found)

    # --- life

    def end_of(self, job_id: str) -> float | None:
        """When the job ends itself: a little before the scheduler would end it. A preemption moves it to the end of the grace time."""
        with self._lock:
            end_s = self._book.end_of(job_id)
        return None if end_s is None else end_s - self.options.ending_s

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """How the jobs are; as last seen while the scheduler is silent, and unknown when that takes long."""
        self._look(with_nodes=False)
        self._ask_history()
        self._withdraw()
        now = self._clock()
        silent = self._watch.failures > 0 and now - self._taken_in > self.options.unreachable_s
        with self._lock:
            return [self._book.status(job_id, now, self._watch.error if silent else '') for job_id in job_ids]

    def _look(self, with_nodes: bool) -> Snapshot:
        snapshot = self._watch.look(with_nodes, self._changed)
        if snapshot.jobs_at > self._taken_in:
            self._taken_in = snapshot.jobs_at
            with self._lock:
                self._book.take_in(snapshot.jobs, snapshot.jobs_at)
                self._note_offers(snapshot)
            self._cancel_unsure([job for job in snapshot.jobs if job.user == self._user])
        return snapshot

    def _note_offers(self, snapshot: Snapshot) -> None:
        ours = self._book.ids()
        names = {name for job in snapshot.jobs if job.job_id in ours for name in job.names}
        if snapshot.nodes_at >= snapshot.jobs_at:
            names |= windows(snapshot.nodes, snapshot.jobs, snapshot.reservations, self._wanted, ours, snapshot.jobs_at).keys()
        self._offers.note(snapshot.jobs_at, names)

    def _cancel_unsure(self, jobs: list[Job]) -> None:
        """Jobs that were submitted after all, when nobody waits for them any more."""
        strays = [job for job in jobs if job.name in self._unsure]
        alive = [job.job_id for job in strays if not is_over(life_of(Seen(job.state)))]
        try:
            if alive:
                self._scheduler.cancel(alive)
            self._unsure -= {job.name for job in strays}
        except SchedulerSilent as error:
            logger.warning('Blocks %s are still to be cancelled: %s', alive, error)

    def _ask_history(self) -> None:
        """Jobs that the queue does not know any more: the scheduler's records, where it keeps some, do."""
        now = self._clock()
        with self._lock:
            missing = {job_id: self._book.place(job_id) for job_id in self._book.missing()}
        if not missing or now < self._next_history:
            return
        self._next_history = now + self._scheduler.history_every_s
        try:
            states = self._scheduler.history(missing)
        except (SchedulerSilent, NotUnderstood, NoHistory) as error:
            logger.info('%s does not tell about jobs %s: %s', self._scheduler.label, list(missing), error)
            self._next_history = math.inf if isinstance(error, NoHistory) else self._next_history
            return
        with self._lock:
            self._book.take_in_history(states)

    def _withdraw(self) -> None:
        """Blocks that have not started while their hole lasted."""
        with self._lock:
            late = self._book.late(self._clock())
        if not late or self._watch.failures:
            return
        try:
            self._scheduler.cancel(late)
        except SchedulerSilent as error:
            logger.warning('Blocks %s have not started in time, and cannot be withdrawn: %s', late, error)
            return
        with self._lock:
            self._book.mark(late, withdrawn=True)
            self._changed = self._clock()

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End these jobs at once.

        Raises
        ------
        SchedulerSilent
            The scheduler did not answer; they may still run.
        """
        self._scheduler.cancel(job_ids)
        with self._lock:
            self._book.mark(job_ids, cancelled=True)
            self._changed = self._clock()

    def find_blocks(self, run: str | None = None) -> tuple[Job, ...]:
        """This user's jobs that are blocks of a run (default: this one) and not over, known to this process or not.

        Raises
        ------
        FreeTrainError
            The scheduler does not answer.
        """
        return tuple(job for job in self._scheduler.jobs() if job.user == self._user and is_block_of(run or self.run, job.name)
                     and not is_over(life_of(Seen(job.state))))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
