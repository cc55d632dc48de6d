"""A queue of a machine with a batch scheduler as a site."""

import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from parsl.jobs.states import JobStatus

from parsl_freetrain.core.model.checked_settings import given
from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, Hole, NodeDemand, NodeOffer
from parsl_freetrain.sites.batch.block_shape import BlockShape, is_block_of
from parsl_freetrain.sites.batch.block_table import BatchBlock, block_from, request_from
from parsl_freetrain.sites.batch.demand import shortest_behind_s
from parsl_freetrain.sites.batch.node_windows import OnTheWay, holes
from parsl_freetrain.sites.batch.options import BatchOptions, given_options
from parsl_freetrain.sites.batch.queue_watch import QueueSnapshot
from parsl_freetrain.sites.batch.records import BatchJob, Partition, warn_once
from parsl_freetrain.sites.batch.scheduler import Scheduler, Shrinking
from parsl_freetrain.sites.batch.submission import Submitter, check_classes, within
from parsl_freetrain.sites.batch.tracker import BlockTracker


class BatchSite:
    """One queue of a machine with a batch scheduler.

    Each scheduler has a subclass that only names its parts. Raises BadInput for a setting that
    cannot be used.

    Parameters
    ----------
    options
        The site config; alternatively its settings as keyword arguments.
    run
        Names this run's jobs, so that they are found again; default: a name that the executor
        gives, or a random one.
    clock
        Wall-clock time in seconds.
    settings
        As the subclass's ``options_type``.
    """

    name: str
    job_variable: str
    options_type: type[BatchOptions]
    scheduler_type: type[Scheduler]
    is_local = False

    def __init__(
        self,
        options: BatchOptions | None = None,
        run: str | None = None,
        clock: Callable[[], float] = time.time,
        **settings: object,
    ) -> None:
        self.options = given_options(self.options_type, type(self).__name__, options, settings)
        self.poll_s = self.options.poll_s
        self.asked_at: float | None = None  #: when that was asked which statuses() last answered
        self.spans_blocks = self.options.spans_blocks
        self.interface: str | None = self.options.interface
        self.script_dir: str | None = None
        self._scheduler = scheduler = self.scheduler_type(self.options)
        self.client = scheduler.client
        self._clock, self._named = clock, run is not None
        self._submitter = Submitter(scheduler, self.options, clock, run or secrets.token_hex(4))
        self._tracker = BlockTracker(scheduler, self.options, clock, self._submitter.unanswered)
        self._partition: Partition | None = None
        self._closed = False
        self._cannot_shrink: set[str] = set()  # blocks that could not be made smaller

    def __repr__(self) -> str:
        said = ', '.join(f'{name}={value!r}' for name, value in given(self.options).items())
        return f'{type(self).__name__}({said}, run={self.run!r})'

    @property
    def run(self) -> str:
        return self._submitter.run

    # --- beginning and end

    def start(self) -> None:
        """Look the queue up. BadInput if it lacks what is asked for; FreeTrainError: no answer."""
        self._closed = False
        if self._partition is None:
            partition = self._look_up()
            self._submitter.check(partition)
            if self.classes:
                check_classes(self.classes, self._scheduler.nodes(), partition)
            self._partition = partition

    def _look_up(self) -> Partition:
        queue = self._partition
        return queue or within(self._tracker.watch.queue(), self.options, self._scheduler.step_s)

    @property
    def classes(self) -> tuple[str, ...]:
        return self.options.classes

    @property
    def queue(self) -> str:
        return self._scheduler.wanted().partition

    def limits(self) -> Partition:
        """What the scheduler says of the queue; BadInput; FreeTrainError without an answer."""
        return self._scheduler.queue()

    def lacking(self) -> str:
        """Why no node of the queue can be used, whatever its state; as :meth:`limits`, after it."""
        return self._scheduler.wanted().lacking(self._scheduler.nodes())

    def close(self) -> None:
        self._closed = True

    # --- holes

    def holes(self) -> tuple[Hole, ...]:
        """What can be had; nothing while the scheduler is silent, or the queue is full."""
        partition = self._partition
        if partition is None or self._closed:
            return ()
        snapshot = self._tracker.snapshot()
        waiting = self._tracker.waiting()
        may_wait = min(self.options.max_waiting, partition.most_waiting or self.options.max_waiting)
        if snapshot is None or len(waiting) >= may_wait or self._submitter.wait_s():
            return ()
        if self._tracker.needs(snapshot).served:
            return ()  # it is their turn, and the scheduler chooses the nodes
        return self._holes(snapshot, partition, waiting, self._tracker.ids())

    def holes_now(self) -> tuple[Hole, ...]:
        """What can be had, for the command line, whatever the config says; as :meth:`start`."""
        partition = self._look_up()
        return self._holes(self._tracker.first_snapshot(), partition, (), frozenset())

    def _holes(
        self,
        snapshot: QueueSnapshot,
        partition: Partition,
        waiting: Collection[BatchBlock],
        ours: frozenset[str],
    ) -> tuple[Hole, ...]:
        now = self._clock()
        partition = replace(partition, up=self._tracker.watch.starts_jobs)
        found = holes(
            self._tracker.usable(snapshot, ours, now),
            [OnTheWay(b.nodes, b.latest_end_s, b.node_class, now + b.needs_s) for b in waiting],
            partition,
            now,
            self.options.limit_margin_s,
            partition.shortest_s + self._tracker.start_s,
            {name: group.node_class for group in snapshot.nodes for name in group.names},
        )
        if why := not found and self._scheduler.wanted().lacking(snapshot.nodes):
            warn_once(f'There are no holes: {why}')
        limit_s = math.inf if partition.longest_s is None else partition.longest_s
        behind_s = max(self.options.shortest_s, shortest_behind_s(snapshot.jobs, ours))
        planned_s = limit_s if self.options.preemptible else min(limit_s, behind_s)
        unplanned_s = min(limit_s, self.options.unplanned_s)
        charge, exempt_s = self.options.charge, self.options.exempt_s
        lengths_s = (unplanned_s if hole.until_s is None else planned_s for hole in found)
        return tuple(
            replace(hole, charge=charge, longest_s=longest_s, exempt_s=exempt_s)
            for hole, longest_s in zip(found, lengths_s, strict=True)
        )

    def offers(self, since: float, until: float) -> tuple[NodeOffer, ...]:
        return self._tracker.offers(since, until)

    # --- blocks

    def open_block(
        self, request: BlockRequest, command: str, name: str, worker_init: str = ''
    ) -> str:
        """Submit a block; its script and output go to ``script_dir``."""
        if self._partition is None or self.script_dir is None:
            missing = 'start() has' if self._partition is None else 'script_dir has'
            raise FreeTrainError(
                f'{type(self).__name__}: a block was asked for before {missing} been set up; use '
                'the site through a BackfillProvider in a FreeTrainExecutor.'
            )
        folder = Path(self.script_dir).absolute()
        self._submitter.start_s = self._tracker.start_s
        what = request, self._partition, folder, name, command, worker_init
        block = self._submitter.submit(*self._submitter.preview(*what))
        self._tracker.add([block])
        return block.job_id

    def preview(
        self, request: BlockRequest, command: str, folder: Path, block: str, worker_init: str
    ) -> tuple[BlockShape, str]:
        """The block that would be submitted now, and its script. As :meth:`open_block`."""
        shape, _, script = self._submitter.preview(
            request, self._look_up(), folder, block, command, worker_init
        )
        return shape, script

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        statuses = self._tracker.statuses(job_ids)
        self.poll_s, self.asked_at = self._tracker.poll_s, self._tracker.taken_in
        return statuses

    def cancel(self, job_ids: Sequence[str]) -> None:
        self._tracker.cancel(job_ids)

    def gone(self, job_id: str) -> None:
        self._tracker.remove(job_id)

    def end_of(self, job_id: str) -> float | None:
        """When the job ends itself: a little before the scheduler, or a preemption, ends it."""
        end_s = self._tracker.end_of(job_id)
        return None if end_s is None else end_s - self.options.ending_s

    # --- what others wait for

    def ask(self, done: Callable[[], None]) -> bool:
        return self._tracker.ask(done)

    def needed(self) -> tuple[tuple[NodeDemand, ...], tuple[BlockNodes, ...]]:
        """As :meth:`.protocols.Yielding.needed`, also in preemptible mode: Slurm may take the wrong
        nodes, or too few. Nothing while the scheduler is silent.
        """
        if not self._tracker.must_look() or (snapshot := self._tracker.snapshot()) is None:
            return (), ()
        demands = self._tracker.reserved(snapshot) + self._tracker.needs(snapshot).demands
        if not demands:
            return (), ()
        return demands, tuple(
            BlockNodes(job, names, self._releasable(job, names))
            for job, names in self._tracker.held.items()
        )

    def leaving(self, job_ids: Sequence[str]) -> None:
        self._tracker.leaving(job_ids)

    def _releasable(self, job_id: str, names: Sequence[str]) -> frozenset[str]:
        if job_id in self._cannot_shrink or not isinstance(self._scheduler, Shrinking):
            return frozenset()
        return frozenset(self._scheduler.releasable(names))

    def release(self, job_id: str, names: Sequence[str]) -> None:
        """As :meth:`.protocols.Yielding.release`; tried once for each block if it fails."""
        assert isinstance(self._scheduler, Shrinking)
        self._cannot_shrink.add(job_id)
        self._tracker.shrink(self._scheduler, job_id, names)
        self._cannot_shrink.discard(job_id)

    # --- adoption

    def identify(self, run: str) -> None:
        if not self._named:
            self._submitter.run, self._named = run, True

    def adopt(self) -> dict[str, BlockRequest]:
        """As :meth:`.protocols.Adopting.adopt`."""
        now, ours = self._clock(), self._tracker.ids()
        found = [job for job in self.find_blocks() if job.job_id not in ours]
        self._tracker.add([block_from(job, self.options, now) for job in found])
        return {job.job_id: request_from(job, self.options, now) for job in found}

    def find_blocks(self, run: str | None = None) -> tuple[BatchJob, ...]:
        """Blocks of a run (default: this one), not over. FreeTrainError without an answer."""
        mine = (job for job in self._scheduler.jobs() if job.user == self._tracker.user)
        run = run or self.run
        return tuple(j for j in mine if is_block_of(run, j.name) and not j.state.is_over)
