"""The Parsl provider that opens blocks of any size, one at a time, at the executor's word."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import typeguard
from parsl.jobs.states import JobState, JobStatus
from parsl.providers.base import ExecutionProvider
from parsl.utils import RepresentationMixin

from parsl_freetrain.core.errors import BadInput, FreeTrainError
from parsl_freetrain.core.words import BlockRequest, Hole
from parsl_freetrain.sites.protocols import Adopting, FoundBlock, Site

logger = logging.getLogger(__name__)


class BackfillProvider(ExecutionProvider, RepresentationMixin):
    """Opens one block per hole, each with nodes and walltime of its own, through an ordinary Parsl provider.

    Parsl's scaling never touches it (it asks for no block by itself): use it in a
    :class:`~parsl_freetrain.executor.FreeTrainExecutor` under ``strategy='none'``.

    Parameters
    ----------
    site
        The machine: where the holes are, and how a block for one is asked for.
    provider
        The Parsl provider that submits and asks; default: the one of the site.
    max_blocks
        At most so many blocks are open at a time.
    min_hole_s
        Holes known to end within so many seconds are not used, until it has been measured how short they may be.
    worker_init
        Shell lines to run in each block before anything else.

    Raises
    ------
    BadInput
        max_blocks below 1 or a negative min_hole_s.
    """

    @typeguard.typechecked
    def __init__(
        self,
        site: Site,
        provider: ExecutionProvider | None = None,
        max_blocks: int = 16,
        min_hole_s: float = 5.0,
        worker_init: str = '',
    ) -> None:
        if max_blocks < 1:
            raise BadInput(f'BackfillProvider: max_blocks is {max_blocks}; it must be at least 1.')
        if not min_hole_s >= 0:
            raise BadInput(f'BackfillProvider: min_hole_s is {min_hole_s}; it must be a number of seconds, 0 or more.')
        self.site = site
        # Parsl's base class names neither launcher nor worker_init, but all its providers for batch systems have them.
        self.provider: Any = site.default_provider() if provider is None else provider
        self.max_blocks = max_blocks
        self.min_hole_s = min_hole_s
        self.worker_init = worker_init
        self.init_blocks = 0
        self.min_blocks = 0
        self.nodes_per_block = 1
        self.parallelism = 0
        self.resources: dict[object, Any] = {}
        self.cores_per_node = None
        self.mem_per_node = None
        self._lock = threading.Lock()
        # Every job of ours, with its final status once it has one.
        self._jobs: dict[str, JobStatus | None] = {}

    @property
    def label(self) -> str:
        """Name of this kind of provider and of its site."""
        return f'backfill-{self.site.name}'

    @property
    def status_polling_interval(self) -> float:  # type: ignore[override]
        """Seconds between two questions about blocks."""
        return self.site.poll_s

    @property
    def script_dir(self) -> str | None:
        """Where batch scripts go; Parsl sets it."""
        folder: str | None = self.provider.script_dir
        return folder

    @script_dir.setter
    def script_dir(self, folder: str | None) -> None:
        self.provider.script_dir = folder

    def submit(self, command: str, tasks_per_node: int, job_name: str = 'parsl.freetrain') -> str:
        """Not for holes: raises FreeTrainError."""
        raise FreeTrainError(
            'BackfillProvider opens blocks only for holes, through open_block(); use it in a FreeTrainExecutor, with '
            "strategy='none' in parsl.Config.")

    def open_block(self, command: str, request: BlockRequest, job_name: str) -> str:
        """Submit one block.

        Parameters
        ----------
        command
            What each node runs.
        request
            How many nodes (or which), for how long.
        job_name
            Name for the scheduler.

        Returns
        -------
        str
            The job's id.

        Raises
        ------
        HoleGone
            The nodes were taken meanwhile.
        FreeTrainError
            ``max_blocks`` blocks are open, or the scheduler did not accept the job.
        BadInput
            The site can never meet the request.
        """
        with self._lock:
            if self._open_count() >= self.max_blocks:
                raise FreeTrainError(
                    f'{self.max_blocks} blocks are open already, as many as max_blocks allows; this one was not submitted.')
            self.site.prepare(self.provider, request)
            job = self._submit(command, job_name)
            if not job:
                raise FreeTrainError(f'{self.provider.label} did not accept the block {job_name}; it gave no job id.')
            job_id = str(job)
            self._jobs[job_id] = None
            self.site.submitted(job_id, request)
        return job_id

    def adopt(self) -> tuple[FoundBlock, ...]:
        """Take over the blocks of an earlier run that are not over; none where blocks end with who submitted them.

        Raises
        ------
        FreeTrainError
            The scheduler does not answer: whether there are any is not known.
        """
        if not isinstance(self.site, Adopting):
            return ()
        with self._lock:
            found = self.site.adopt()
            self._jobs |= dict.fromkeys((block.job_id for block in found), None)
        return found

    def _submit(self, command: str, job_name: str) -> object:
        theirs = getattr(self.provider, 'worker_init', '')
        if not self.worker_init:
            return self.provider.submit(command, 1, job_name)
        self.provider.worker_init = f'{theirs}\n{self.worker_init}\n'
        try:
            return self.provider.submit(command, 1, job_name)
        finally:
            self.provider.worker_init = theirs

    def _open_count(self) -> int:
        return sum(status is None for status in self._jobs.values())

    def status(self, job_ids: Sequence[Any]) -> list[JobStatus]:
        """How the jobs are; UNKNOWN where that could not be found out, which never means that a job is over.

        A job that was seen to be over stays so, and is not asked about again.
        """
        wanted = [str(job_id) for job_id in job_ids]
        with self._lock:
            asked = [job_id for job_id in dict.fromkeys(wanted) if self._jobs.get(job_id, _NOT_OURS) is None]
        answers = self._ask(asked)
        over = []
        with self._lock:
            for job_id, status in answers.items():
                if status.terminal and self._jobs[job_id] is None:
                    self._jobs[job_id] = status
                    over.append(job_id)
            known = {job_id: self._jobs.get(job_id) for job_id in wanted}
        for job_id in over:
            self.site.gone(job_id)
        return [known[job_id] or answers.get(job_id, _unknown('not a job of this provider')) for job_id in wanted]

    def _ask(self, job_ids: list[str]) -> dict[str, JobStatus]:
        if not job_ids:
            return {}
        try:
            answers = list(self.provider.status(job_ids))
        except Exception as error:
            logger.warning('%s could not be asked about jobs %s', self.provider.label, job_ids, exc_info=True)
            return {job_id: _unknown(f'could not ask: {error}') for job_id in job_ids}
        if len(answers) != len(job_ids):
            # Which answer is missing cannot be told.
            logger.warning('%s gave %d answers about %d jobs', self.provider.label, len(answers), len(job_ids))
            return {job_id: _unknown('answers are missing') for job_id in job_ids}
        return {job_id: answer if isinstance(answer, JobStatus) else _unknown('no answer')
                for job_id, answer in zip(job_ids, answers, strict=True)}

    def cancel(self, job_ids: Sequence[Any]) -> list[bool]:
        """End the jobs; False for each that could not be cancelled, which may still run.

        A job that was seen to be over counts as cancelled.
        """
        wanted = [str(job_id) for job_id in job_ids]
        with self._lock:
            running = [job_id for job_id in dict.fromkeys(wanted) if self._jobs.get(job_id, _NOT_OURS) is None]
        done: dict[str, bool] = {}
        if running:
            try:
                done = dict(zip(running, self.provider.cancel(running), strict=True))
            except Exception:
                logger.warning('%s could not cancel jobs %s', self.provider.label, running, exc_info=True)
        for job_id, cancelled in done.items():
            if cancelled:
                with self._lock:
                    self._jobs[job_id] = self._jobs[job_id] or JobStatus(JobState.CANCELLED)
                self.site.gone(job_id)
        with self._lock:
            return [self._jobs.get(job_id) is not None for job_id in wanted]

    def holes(self) -> tuple[Hole, ...]:
        """What can be had now: the largest holes first, none that ends too soon, no more than blocks may be opened."""
        now = time.time()
        useful = [hole for hole in self.site.holes() if hole.until_s is None or hole.until_s - now >= self.min_hole_s]
        useful.sort(key=lambda hole: -hole.nodes)
        with self._lock:
            return tuple(useful[:max(0, self.max_blocks - self._open_count())])

    def end_of(self, job_id: str) -> float | None:
        """When the job ends, in seconds of ``time.time()``; None while unknown."""
        return self.site.end_of(job_id)


def _unknown(why: str) -> JobStatus:
    return JobStatus(JobState.UNKNOWN, why)


_NOT_OURS = _unknown('not a job of this provider')
