"""What a site is: where holes come from, how a block is opened, and how its job is followed."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from parsl.jobs.states import JobStatus

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.core.model.types import BlockNodes, BlockRequest, Hole, NodeDemand, NodeOffer


class HoleGone(FreeTrainError, RuntimeError):
    """The nodes were taken before the block was submitted. Look at the holes again."""


class Site(Protocol):
    """One machine with one batch scheduler."""

    name: str  #: for logs and for the ledger
    is_local: bool  #: nodes are processes of this computer
    spans_blocks: bool  #: whether one fragment may use nodes of several blocks
    poll_s: float  #: seconds between two questions about blocks
    interface: str | None  #: the network interface that ranks use; None: they choose
    script_dir: str | None  #: for batch scripts and output of blocks; Parsl sets it by the provider

    def start(self) -> None:
        """The executor starts; a schedule's time 0 is now. A second call changes nothing, but after
        :meth:`close`: another Parsl configuration uses the site.
        """

    def close(self) -> None:
        """The executor has ended; there are no holes any more."""

    def holes(self) -> tuple[Hole, ...]:
        """What can be had now beyond the open blocks; ``until_s`` in seconds of ``time.time()``."""

    def open_block(
        self, request: BlockRequest, command: str, name: str, worker_init: str = ''
    ) -> str:
        """Submit one block; returns the id of its job. Raises BadInput if the request can never be
        met; HoleGone if it cannot be met any more; FreeTrainError if the scheduler refused the job,
        or did not answer. ``command``: of each node, for the shell; ``name``: unlike every other
        block's; ``worker_init``: shell lines that run once before.
        """

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """The status of each of these jobs of ours. UNKNOWN if the scheduler cannot be asked, which
        never means over; FreeTrainError where nothing at all could be learned.
        """

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End these jobs. Raises FreeTrainError without an answer; the jobs may still run."""

    def gone(self, job_id: str) -> None:
        """The job is over: its nodes can be offered again. Ignores jobs that it does not know."""

    def end_of(self, job_id: str) -> float | None:
        """When the job ends, in seconds of ``time.time()``; None: unknown. A notice tells it."""

    def offers(self, since: float, until: float) -> tuple[NodeOffer, ...]:
        """Which nodes were idle for us, clipped to these times in seconds of ``time.time()``."""


@runtime_checkable
class Adopting(Protocol):
    """A site whose blocks outlive the submitting process, and are found again by their names;
    ``job_variable``: of the environment on each node, with the id of its job.
    """

    job_variable: str

    def identify(self, run: str) -> None:
        """Name the run of later blocks, unless the site has a name; before :meth:`Site.start`."""

    def adopt(self) -> dict[str, BlockRequest]:
        """Blocks of the run that are not over, by their jobs, as if asked for now; from now on they
        count as opened by this process. FreeTrainError if the scheduler does not answer.
        """


@runtime_checkable
class Yielding(Protocol):
    """A site with other people's jobs, which may wait for nodes that blocks hold."""

    def ask(self, done: Callable[[], None]) -> bool:
        """Begin to ask for what was looked at since the last time, so that the next looks need not
        wait; another thread calls ``done``. False if nothing is asked.
        """

    def needed(self) -> tuple[tuple[NodeDemand, ...], tuple[BlockNodes, ...]]:
        """The jobs that would start now on nodes of blocks, and these nodes, by job id."""

    def leaving(self, job_ids: Sequence[str]) -> None:
        """The nodes of these jobs have been told to end them: they count as ending."""

    def release(self, job_id: str, names: Sequence[str]) -> None:
        """Give some nodes of a block back; it goes on with the others. Only for nodes that
        :meth:`needed` calls releasable. Raises FreeTrainError if the scheduler does not do it.
        """
