"""Parsl's view of blocks on a batch scheduler.

Parsl's own providers fold states together, take a job that is missing from an answer for completed, and wait for the
scheduler in the thread that asks. This one hands everything to its site.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parsl.jobs.states import JobStatus
from parsl.providers.base import ExecutionProvider
from parsl.utils import RepresentationMixin

from parsl_freetrain.core.errors import FreeTrainError

if TYPE_CHECKING:
    from parsl_freetrain.sites.batch.site import BatchSite


class BatchProvider(ExecutionProvider, RepresentationMixin):
    """Submits the blocks of a :class:`~parsl_freetrain.sites.batch.site.BatchSite`, one per hole.

    Parameters
    ----------
    site
        Where the blocks are.
    """

    def __init__(self, site: BatchSite) -> None:
        self.site = site
        self.worker_init = ''
        self.nodes_per_block = 1
        self.init_blocks = self.min_blocks = 0
        self.max_blocks = 1_000_000
        self.parallelism = 0
        self.resources: dict[object, Any] = {}
        self.cores_per_node = None
        self.mem_per_node = None
        self._script_dir: str | None = None

    @property
    def label(self) -> str:
        """Name of its site."""
        return self.site.name

    @property
    def status_polling_interval(self) -> float:  # type: ignore[override]
        """Seconds between two questions about blocks."""
        return self.site.poll_s

    @property
    def script_dir(self) -> str | None:
        """Where batch scripts and the blocks' output go; Parsl sets it."""
        return self._script_dir

    @script_dir.setter
    def script_dir(self, folder: str | None) -> None:
        self._script_dir = folder

    def submit(self, command: str, tasks_per_node: int, job_name: str = 'parsl.freetrain') -> str:
        """Submit the block that the site has prepared; the job's id.

        Raises
        ------
        FreeTrainError
            The scheduler refused it, with its own words and the script's path, or did not answer.
        """
        if self._script_dir is None:
            raise FreeTrainError('The provider has no folder for its scripts yet; Parsl sets script_dir when it starts.')
        folder = Path(self._script_dir).absolute()
        return self.site.submit(folder, command, job_name, self.worker_init)

    def status(self, job_ids: Sequence[Any]) -> list[JobStatus]:
        """How the jobs are, as far as the scheduler has said."""
        return self.site.statuses([str(job_id) for job_id in job_ids])

    def cancel(self, job_ids: Sequence[Any]) -> list[bool]:
        """End the jobs, all or none.

        Raises
        ------
        FreeTrainError
            The scheduler did not answer.
        """
        self.site.cancel([str(job_id) for job_id in job_ids])
        return [True] * len(job_ids)


def write_private(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file that nobody else can read."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), 'w') as file:
        file.write(text)
