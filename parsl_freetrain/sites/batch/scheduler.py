"""The seam between what all batch schedulers have in common and what each of them has of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.sites.batch.commands import Commands
from parsl_freetrain.sites.batch.holes import Wanted
from parsl_freetrain.sites.batch.records import Job, Nodes, Partition, Reservation
from parsl_freetrain.sites.batch.shape import BlockShape, Place


class NoHistory(FreeTrainError, RuntimeError):
    """The scheduler keeps no record of jobs that are over."""


class Scheduler(Protocol):
    """One kind of batch scheduler, as its users see it: commands, their answers, and batch scripts.

    All questions may raise SchedulerSilent, and NotUnderstood for an answer that is not as documented.

    Attributes
    ----------
    label
        Its name, for sentences.
    step_s
        Walltimes are whole multiples of so many seconds.
    script_mode
        Permissions of batch scripts.
    history_every_s
        At least so many seconds are between two questions for :meth:`history`.
    """

    label: str
    step_s: int
    script_mode: int
    history_every_s: float

    @property
    def client(self) -> Commands:
        """Runs its commands, and counts them."""
        ...

    def queue(self) -> Partition:
        """What the queue of the site config allows; raises BadInput where that is not what the site config asks for."""
        ...

    def wanted(self) -> Wanted:
        """Which nodes blocks can use."""
        ...

    def jobs(self) -> tuple[Job, ...]:
        """Everybody's jobs that are not over, as far as they may be seen; some that are over may be among them."""
        ...

    def nodes(self) -> tuple[Nodes, ...]:
        """The machine's nodes."""
        ...

    def reservations(self) -> tuple[Reservation, ...]:
        """Nodes that are set aside, now or later."""
        ...

    def history(self, places: dict[str, Place]) -> dict[str, str]:
        """States of these jobs, which the queue does not know any more, as far as they are over; raises NoHistory."""
        ...

    def render(self, shape: BlockShape, place: Place, command: str, worker_init: str = '') -> str:
        """The batch script of a block; each node runs ``command``, after the shell lines ``worker_init``."""
        ...

    def test(self, script: Path) -> None:
        """Ask whether a script would be accepted, where that can be asked; submits nothing. Raises Refused."""
        ...

    def submit(self, script: Path) -> str:
        """Submit a script; the job's id. Raises Refused; after SchedulerSilent it may have been submitted all the same."""
        ...

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End jobs; those that are over already are no error. After SchedulerSilent they may still run."""
        ...
