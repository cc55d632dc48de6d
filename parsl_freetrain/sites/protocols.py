"""The seams of a site: what can be had, how a block for it is asked for, and when a block ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from parsl.providers.base import ExecutionProvider

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.core.words import BlockRequest, Hole


class HoleGone(FreeTrainError, RuntimeError):
    """The nodes of a request were taken between the look at the holes and the request; look again."""


@dataclass(frozen=True)
class Offer:
    """A node was idle for us from ``start`` to ``end``, in seconds of ``time.time()``."""

    node: str
    start: float
    end: float


class HoleSource(Protocol):
    """Anything that knows of holes."""

    def holes(self) -> tuple[Hole, ...]:
        """What can be had now beyond the open blocks; ``until_s`` in seconds of ``time.time()``."""
        ...


class Site(HoleSource, Protocol):
    """One machine with one batch scheduler.

    Attributes
    ----------
    name
        For logs and for the ledger.
    spans_blocks
        Whether one fragment may use nodes of several blocks.
    poll_s
        How long to wait between two questions about blocks, in seconds.
    interface
        The network interface that ranks use; None lets them choose.
    """

    name: str
    spans_blocks: bool
    poll_s: float
    interface: str | None

    def start(self) -> None:
        """The executor starts; a schedule's time 0 is now. A second call changes nothing."""
        ...

    def close(self) -> None:
        """The executor has ended; there are no holes any more."""
        ...

    def default_provider(self) -> ExecutionProvider:
        """The Parsl provider for blocks of this site, where the user gives none."""
        ...

    def prepare(self, provider: ExecutionProvider, request: BlockRequest) -> None:
        """Make ``provider``'s next submission the block that ``request`` describes: nodes, walltime, launcher.

        Called under a lock, just before the submission. Raises BadInput for a request that can never be
        met and HoleGone for one that cannot be met any more.
        """
        ...

    def submitted(self, job_id: str, request: BlockRequest) -> None:
        """The submission just prepared is job ``job_id``."""
        ...

    def gone(self, job_id: str) -> None:
        """The job is over; its nodes can be offered again. Unknown jobs and second calls are ignored."""
        ...

    def end_of(self, job_id: str) -> float | None:
        """When the job ends, in seconds of ``time.time()``; None while unknown. A notice makes it known."""
        ...

    def offers(self, since: float, until: float) -> tuple[Offer, ...]:
        """Which nodes were idle for us when, clipped to these times in seconds of ``time.time()``."""
        ...


@dataclass(frozen=True)
class FoundBlock:
    """A block of an earlier run that waits or runs; ``end_s`` in seconds of ``time.time()``, None while unknown."""

    job_id: str
    nodes: int
    queue: str = ''
    end_s: float | None = None


@runtime_checkable
class Adopting(Protocol):
    """A site whose blocks outlive the process that submitted them, and can be found again by their names.

    Attributes
    ----------
    job_variable
        The environment variable that tells a node of a block the id of its job.
    """

    job_variable: str

    def identify(self, run: str) -> None:
        """Blocks submitted from now on belong to this run, unless the site has been told another name. Before :meth:`Site.start`."""
        ...

    def adopt(self) -> tuple[FoundBlock, ...]:
        """Blocks of the run that are not over; from now on they count as submitted by this process.

        Raises FreeTrainError if the scheduler does not answer.
        """
        ...
