"""The Parsl provider of a site: opens blocks of any size when the executor asks for one."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from parsl.jobs.states import JobState, JobStatus
from parsl.providers.base import ExecutionProvider
from parsl.utils import RepresentationMixin

from parsl_freetrain.core.model.checked_settings import checked_arguments
from parsl_freetrain.core.model.checked_values import AtLeast1, SecondsOrNever
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import BlockRequest, Hole
from parsl_freetrain.sites.packed_environment import PackedEnvironment
from parsl_freetrain.sites.protocols import Adopting, Site, Yielding

logger = logging.getLogger(__name__)


class BackfillProvider(ExecutionProvider, RepresentationMixin):
    """Opens one block per hole, each with its own number of nodes and walltime.

    Only a :class:`~parsl_freetrain.executor.FreeTrainExecutor` can use it. Parsl's own scaling,
    which asks for blocks that are all alike, is refused. Raises BadInput for max_blocks below 1 or
    a negative min_hole_s.

    Parameters
    ----------
    site
        The machine: where the holes are, and how blocks are opened there.
    max_blocks
        Maximum number of open blocks.
    min_hole_s
        Minimum length of a hole in seconds, until the executor has measured how short a hole may
        be.
    worker_init
        Shell lines to run in each block before anything else.
    environment
        Each node unpacks it to its own disk; None: nodes import from the shared file system.
    """

    @checked_arguments('BackfillProvider')
    def __init__(
        self,
        site: Site,
        max_blocks: AtLeast1 = 16,
        min_hole_s: SecondsOrNever = 5.0,
        worker_init: str = '',
        environment: PackedEnvironment | None = None,
    ) -> None:
        self.site, self.environment = site, environment
        self.max_blocks, self.min_hole_s = max_blocks, min_hole_s
        self.worker_init = worker_init
        # Parsl asks every provider for these; they keep its scaling from wanting a block.
        self.init_blocks = self.min_blocks = self.parallelism = 0
        self.nodes_per_block = 1
        self.resources: dict[object, Any] = {}
        self.cores_per_node = self.mem_per_node = None
        self._lock = threading.Lock()
        # Every job of ours, with its final status once it has one.
        self._jobs: dict[str, JobStatus | None] = {}

    @property
    def label(self) -> str:
        return f'backfill-{self.site.name}'

    @property
    def status_polling_interval(self) -> float:  # type: ignore[override]
        return self.site.poll_s

    @property
    def script_dir(self) -> str | None:
        return self.site.script_dir

    @script_dir.setter
    def script_dir(self, folder: str | None) -> None:
        self.site.script_dir = folder

    def submit(self, command: str, tasks_per_node: int, job_name: str = 'parsl.freetrain') -> str:
        """Raises BadInput: Parsl's scaling says nothing of a block's nodes and walltime."""
        raise BadInput(
            'BackfillProvider opens blocks only for holes, and only for a FreeTrainExecutor, which '
            'calls open_block() itself; give other executors a provider of their own.'
        )

    def open_block(self, request: BlockRequest, command: str, name: str) -> str:
        """Submit one block, for a number of nodes (or which ones); returns the id of its job.
        Raises as :meth:`.protocols.Site.open_block`; FreeTrainError if ``max_blocks`` are open.
        """
        with self._lock:
            if self._full():
                raise FreeTrainError(
                    f'{self.max_blocks} blocks are open already, which is the maximum '
                    '(max_blocks); this one was not submitted.'
                )
            job_id = self.site.open_block(request, command, name, self.worker_init)
            self._jobs[job_id] = None
        return job_id

    def adopt(self) -> dict[str, BlockRequest]:
        """Take over blocks of an earlier run. FreeTrainError without an answer."""
        if not isinstance(self.site, Adopting):
            return {}
        with self._lock:
            found = self.site.adopt()
            self._jobs |= dict.fromkeys(found, None)
        return found

    def _full(self) -> bool:
        return sum(status is None for status in self._jobs.values()) >= self.max_blocks

    def status(self, job_ids: Sequence[Any]) -> list[JobStatus]:
        """As the site says; one that was seen to be over stays so, and is not asked about again."""
        wanted = [str(job_id) for job_id in job_ids]
        answers = self._ask(self._open_ones(wanted))
        over = []
        with self._lock:
            for job_id, status in answers.items():
                if status.terminal and self._jobs[job_id] is None:
                    self._jobs[job_id] = status
                    over.append(job_id)
            known = {job_id: self._jobs.get(job_id) for job_id in wanted}
        for job_id in over:
            self.site.gone(job_id)
        return [
            known[job_id] or answers.get(job_id, _unknown('not a job of this provider'))
            for job_id in wanted
        ]

    def _open_ones(self, job_ids: Sequence[str]) -> list[str]:
        """Those of our jobs that were not seen to be over, each once."""
        with self._lock:
            return [i for i in dict.fromkeys(job_ids) if i in self._jobs and self._jobs[i] is None]

    def _ask(self, job_ids: list[str]) -> dict[str, JobStatus]:
        if not job_ids:
            return {}
        try:
            return dict(zip(job_ids, self.site.statuses(job_ids), strict=True))
        except Exception as error:
            logger.warning('%s could not be asked about %s', self.label, job_ids, exc_info=True)
            return {job_id: _unknown(f'could not ask: {error}') for job_id in job_ids}

    def cancel(self, job_ids: Sequence[Any]) -> list[bool]:
        """End the jobs; False for each that may still run."""
        wanted = [str(job_id) for job_id in job_ids]
        running = self._open_ones(wanted)
        try:
            if running:
                self.site.cancel(running)
        except Exception:
            logger.warning('%s could not cancel %s', self.label, running, exc_info=True)
            running = []
        for job_id in running:
            with self._lock:
                self._jobs[job_id] = self._jobs[job_id] or JobStatus(JobState.CANCELLED)
            self.site.gone(job_id)
        with self._lock:
            return [self._jobs.get(job_id) is not None for job_id in wanted]

    def release(self, job_id: str, nodes: Sequence[str]) -> None:
        assert isinstance(self.site, Yielding)
        self.site.release(job_id, nodes)

    def holes(self) -> tuple[Hole, ...]:
        """What can be had now, however short; nothing while ``max_blocks`` blocks are open."""
        with self._lock:
            full = self._full()
        return () if full else self.site.holes()

    def end_of(self, job_id: str) -> float | None:
        return self.site.end_of(job_id)


def _unknown(why: str) -> JobStatus:
    return JobStatus(JobState.UNKNOWN, why)
