"""What each batch scheduler has of its own; all else in this folder is the same for all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.sites.batch import records
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.scheduler_commands import Commands


class NoHistory(FreeTrainError, RuntimeError):
    """The scheduler keeps no record of jobs that are over."""


class Scheduler(Protocol):
    """One kind of batch scheduler: commands, their answers, and batch scripts. Questions may raise
    SchedulerSilent without an answer, and NotUnderstood for one that is not as documented.
    """

    label: str  #: its name, for sentences
    step_s: int  #: walltimes are multiples of this, in seconds
    script_mode: int  #: permissions of batch scripts
    #: Most seconds between questions for :meth:`nodes`; infinite where jobs tell it.
    nodes_every_s: float
    history_every_s: float  #: minimum time between two questions for :meth:`history`, in seconds

    def __init__(self, options: Any) -> None:
        """``options``: the site's, of its ``options_type``."""

    @property
    def client(self) -> Commands:
        """Runs its commands, and counts them."""

    def queue(self) -> records.Partition:
        """What the queue allows; raises BadInput if that is not what the site config asks for."""

    def wanted(self) -> Wanted:
        """Which nodes blocks can use."""

    def jobs(self) -> tuple[records.BatchJob, ...]:
        """Everybody's jobs that may be seen and are not over, and perhaps some that are."""

    def nodes(self) -> tuple[records.Nodes, ...]:
        """The machine's nodes."""

    def reservations(self) -> tuple[records.NodeReservation, ...]:
        """Nodes that are set aside, now or later."""

    def history(self, places: dict[str, Output]) -> dict[str, records.JobState]:
        """States of those that are over, of jobs not in the queue any more; raises NoHistory."""

    def needs_s(self, shape: BlockShape) -> int:
        """How long the nodes of a block must be free for it to start, in seconds."""

    def render(self, shape: BlockShape, place: Output, command: str, worker_init: str = '') -> str:
        """The batch script of a block: the lines ``worker_init``, then ``command`` on each node."""

    def test(self, script: Path) -> None:
        """Ask whether a script would be accepted, if that can be asked. Raises SchedulerRefused."""

    def submit(self, script: Path) -> str:
        """Returns the job's id. SchedulerRefused; SchedulerSilent: it may be submitted."""

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs; those that are over are no error. After SchedulerSilent they may still run."""


@runtime_checkable
class Shrinking(Protocol):
    """A scheduler that can take nodes away from a running job."""

    def releasable(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of a job's nodes that can be taken away while it goes on."""

    def shrink(self, job_id: str, keep: Sequence[str], leave: Sequence[str]) -> None:
        """Take ``leave`` away from a job; it goes on with ``keep``. Raises SchedulerRefused."""
