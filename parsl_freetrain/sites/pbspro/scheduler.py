"""PBS as a scheduler: which command answers which question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.sites.batch.commands import Commands, Refused, SchedulerSilent, in_one_line
from parsl_freetrain.sites.batch.holes import Wanted
from parsl_freetrain.sites.batch.records import Job, Nodes, Partition, Reservation
from parsl_freetrain.sites.batch.scheduler import NoHistory
from parsl_freetrain.sites.batch.shape import BlockShape, Place
from parsl_freetrain.sites.pbspro import answers
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.script import render

# Statuses are the last byte of an error's number (pbs_error.h): 15139 the job has finished, 15140 no history is kept, 15001 no such job.
FINISHED, NO_HISTORY, UNKNOWN = 35, 36, 153


class Pbs:
    """One queue of a machine with PBS Pro or OpenPBS; a :class:`~parsl_freetrain.sites.batch.scheduler.Scheduler`."""

    label = 'PBS'
    step_s = 1
    script_mode = 0o600

    def __init__(self, options: PbsOptions) -> None:
        self._options = options
        self.client = Commands('PBS', options.command_s, meddling=('PBS_DPREFIX', 'PBS_DEFAULT_ARGS', 'QSTAT_'))
        self.history_every_s = options.poll_s    # every job that ends is asked about
        self._chunk: dict[str, str] = {}

    def queue(self) -> Partition:
        """The queue, and what its jobs ask of a node without saying it."""
        name = self._options.queue
        queues = answers.parse_queues(self.client.ask(answers.QUEUES))
        queue = queues.get(name)
        if queue is None:
            raise BadInput(f'PBS has no queue {name!r}; it has {", ".join(sorted(queues)) or "none that you may see"}.')
        if queue.get('enabled', 'True') != 'True':
            raise BadInput(f'The queue {name!r} takes no jobs (it is not enabled); name another queue.')
        if queue.get('from_route_only') == 'True':
            routes = sorted(route for route, q in queues.items() if name in str(q.get('route_destinations', '')).split(','))
            raise BadInput(f'The queue {name!r} takes jobs only from {", ".join(routes) or "another queue"}; name that one.')
        self._chunk = {key: str(value) for key, value in queue.get('default_chunk', {}).items()}
        return answers.limits(name, queue)

    def wanted(self) -> Wanted:
        """Nodes with the GPUs of the options; which other resources they need is known to :meth:`nodes`."""
        return Wanted(self._options.queue, (), self._options.gpus_per_node)

    def jobs(self) -> tuple[Job, ...]:
        """``qstat`` of everything that is not over."""
        return answers.parse_jobs(self.client.ask(answers.JOBS), self._options.queue)

    def nodes(self) -> tuple[Nodes, ...]:
        """``pbsnodes`` of the nodes that have what blocks need."""
        return answers.parse_nodes(self.client.ask(answers.NODES), self._options.queue, {**self._chunk, **self._options.node_resources})

    def reservations(self) -> tuple[Reservation, ...]:
        """``pbs_rstat``."""
        return answers.parse_reservations(self.client.ask(answers.RESERVATIONS))

    def history(self, places: dict[str, Place]) -> dict[str, str]:
        """``qstat -x``, where PBS keeps a history."""
        done = self.client.run(answers.history_of(list(places)))
        if done.returncode == NO_HISTORY:
            raise NoHistory(f'PBS keeps no history: {in_one_line(done.stderr)}')
        if done.returncode not in (0, FINISHED, UNKNOWN):
            raise SchedulerSilent(f'qstat -x failed with status {done.returncode}: {in_one_line(done.stderr)}')
        return {job.job_id: job.state for job in answers.parse_jobs(done.stdout, self._options.queue)} if done.stdout.strip() else {}

    def render(self, shape: BlockShape, place: Place, command: str, worker_init: str = '') -> str:
        """A script for qsub."""
        return render(self._options, shape, place, command, worker_init)

    def test(self, script: Path) -> None:
        """PBS cannot be asked: qsub submits, or refuses."""

    def submit(self, script: Path) -> str:
        """``qsub``."""
        done = self.client.run(('qsub', str(script)))
        job_id = done.stdout.strip()
        if 'cannot connect' in done.stderr or 'errno=150' in done.stderr:
            raise SchedulerSilent(f'qsub did not reach PBS: {in_one_line(done.stderr)}')
        if done.returncode or not job_id:
            raise Refused(f'qsub refused the script {script}: {in_one_line(done.stderr).replace("qsub: ", "") or "it gave no job id"}')
        return job_id.splitlines()[-1]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """``qdel``."""
        done = self.client.run(('qdel', *job_ids))
        failed = [line for line in done.stderr.splitlines()
                  if line.strip() and 'Unknown Job' not in line and 'has finished' not in line and 'invalid state' not in line]
        if failed or (done.returncode and not done.stderr.strip()):
            raise SchedulerSilent(f'qdel of {", ".join(job_ids)} failed with status {done.returncode}: {in_one_line(done.stderr)}')
