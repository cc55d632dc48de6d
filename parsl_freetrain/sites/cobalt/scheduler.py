"""Cobalt as a scheduler: which command answers which question."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.block_shape import BlockShape, Place
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.records import (
    BatchJob,
    JobState,
    NodeReservation,
    Nodes,
    Partition,
)
from parsl_freetrain.sites.batch.scheduler_commands import Commands
from parsl_freetrain.sites.cobalt import answers
from parsl_freetrain.sites.cobalt.options import CobaltOptions
from parsl_freetrain.sites.cobalt.script import log_of, render

_UNREACHED = ('failed to connect', 'unable to connect', 'connection refused')


class Cobalt:
    """One queue of a machine with Cobalt; a
    :class:`~parsl_freetrain.sites.batch.scheduler.Scheduler`.
    """

    label = 'Cobalt'
    step_s = 60
    script_mode = 0o700  # Cobalt runs the script itself, and not a copy
    history_every_s = 0.0  # it is in files of the block's own

    def __init__(self, options: CobaltOptions, clock: Callable[[], float] = time.time) -> None:
        self._options = options
        self._clock = clock
        self.client = Commands('Cobalt', options.command_s, meddling=('QSTAT_', 'COBALT_'))

    def queue(self) -> Partition:
        """The queue."""
        queues = answers.parse_queues(self.client.ask(answers.QUEUES))
        if self._options.queue not in queues:
            raise BadInput(
                f'Cobalt has no queue {self._options.queue!r}; it has '
                f'{", ".join(sorted(queues)) or "none that you may see"}.'
            )
        return queues[self._options.queue]

    def wanted(self) -> Wanted:
        """Its nodes in the memory mode of the options."""
        modes = frozenset(f'{name}={value}' for name, value in self._options.modes().items())
        return Wanted(self._options.queue, (modes,) if modes else ())

    def jobs(self) -> tuple[BatchJob, ...]:
        """``qstat``."""
        return answers.parse_jobs(self.client.ask(answers.JOBS), self._options.queue)

    def nodes(self) -> tuple[Nodes, ...]:
        """``nodelist``."""
        return answers.parse_nodes(
            self.client.ask(answers.NODES), self._options.queue, self._clock()
        )

    def reservations(self) -> tuple[NodeReservation, ...]:
        """``showres``."""
        return answers.parse_reservations(self.client.ask(answers.RESERVATIONS))

    def history(self, places: dict[str, Place]) -> dict[str, JobState]:
        """What each job's own log says; Cobalt itself forgets a job that is over."""
        found = {}
        for job_id, place in places.items():
            try:
                state = (
                    answers.ended(Path(log_of(place)).read_text(errors='replace'))
                    if place.stdout
                    else None
                )
            except OSError:
                continue
            if state is not None:
                found[job_id] = state
        return found

    def needs_s(self, shape: BlockShape) -> int:
        return shape.walltime_s

    def render(self, shape: BlockShape, place: Place, command: str, worker_init: str = '') -> str:
        """A script for qsub."""
        return render(self._options, shape, place, command, worker_init)

    def test(self, script: Path) -> None:
        """Cobalt cannot be asked: qsub submits, or refuses."""

    def submit(self, script: Path) -> str:
        """``qsub``, whose options stand in the script."""
        return self.client.submit(('qsub', str(script)), r'(\d+)', _UNREACHED)

    def cancel(self, job_ids: Sequence[str]) -> None:
        """``qdel``; jobs that it does not find are over."""
        self.client.cancel(('qdel', *job_ids), ('not found', 'no jobs'))
