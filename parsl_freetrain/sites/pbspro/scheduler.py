"""PBS as a scheduler: which command answers which question."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch import records
from parsl_freetrain.sites.batch import scheduler_commands as commands
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.scheduler import NoHistory
from parsl_freetrain.sites.pbspro import answers
from parsl_freetrain.sites.pbspro.options import PbsOptions
from parsl_freetrain.sites.pbspro.script import render

# Statuses are the last byte of an error's number (pbs_error.h): 15139 the job has finished, 15140
# no history is kept, 15001 no such job.
FINISHED, NO_HISTORY, UNKNOWN = 35, 36, 153
_OVER = ('unknown job', 'has finished', 'invalid state')


class Pbs:
    label = 'PBS'
    step_s = 1
    script_mode = 0o600
    nodes_every_s = math.inf

    def __init__(self, options: PbsOptions) -> None:
        self._options = options
        self.client = commands.Commands(
            'PBS', options.command_s, meddling=('PBS_DPREFIX', 'PBS_DEFAULT_ARGS', 'QSTAT_')
        )
        self.history_every_s = options.poll_s  # every job that ends is asked about
        self._chunk: dict[str, str] = {}
        self._owners: frozenset[tuple[str, str]] = frozenset({('', '')})
        self._apart: frozenset[str] = frozenset()
        self._ranks: dict[str, int] = {}  # of queues
        self._features: frozenset[str] = frozenset()  # of the nodes; empty until they were seen
        self._suspended: frozenset[str] = frozenset()

    def queue(self) -> records.Partition:
        """The queue, and what its jobs ask of a node without saying it."""
        name = self._options.queue
        queues = answers.parse_queues(self.client.ask(answers.QUEUES))
        queue = commands.offered('PBS', 'queue', name, queues)
        if queue.get('enabled', 'True') != 'True':
            raise BadInput(
                f'The queue {name!r} takes no jobs (it is not enabled); name another queue.'
            )
        if queue.get('from_route_only') == 'True':
            ends = {each: str(q.get('route_destinations', '')) for each, q in queues.items()}
            routes = ', '.join(sorted(each for each in ends if name in ends[each].split(',')))
            raise BadInput(
                f'The queue {name!r} takes jobs only from {routes or "another queue"}; name that '
                'one.'
            )
        chunk = queue.get('default_chunk') or {}
        self._chunk = {key: str(value) for key, value in chunk.items()}
        self._owners = answers.node_owners(name, queues)
        owners = {other: answers.node_owners(other, queues) for other in queues}
        self._apart = frozenset(other for other in queues if not self._owners & owners[other])
        self._ranks = answers.queue_ranks(queues)
        found, server = answers.limits(name, queue), self.client.run(answers.SERVER).stdout
        # Of a queue with a partition, another scheduler starts the jobs.
        starts = 'partition' in queue or not answers.is_off('scheduling', server)
        hidden = answers.is_off('query_other_jobs', server)
        return replace(found, up=found.up and starts, jobs_hidden=hidden)

    def wanted(self) -> Wanted:
        """Nodes with the GPUs of the options; :meth:`nodes` knows which resources they need."""
        return Wanted(self._options.queue, (), self._options.gpus_per_node, self._options.classes)

    def jobs(self) -> tuple[records.BatchJob, ...]:
        jobs = answers.parse_jobs(
            self.client.ask(answers.JOBS),
            self._options.queue,
            self._features,
            self._apart,
            self._ranks,
        )
        self._suspended = frozenset(j.job_id for j in jobs if j.state is records.JobState.SUSPENDED)
        return jobs

    def nodes(self) -> tuple[records.Nodes, ...]:
        found = answers.parse_nodes(
            self.client.ask(answers.NODES),
            self._options.queue,
            {**self._chunk, **self._options.node_resources},
            self._owners,
            self._options.node_classes,
        )
        self._features = frozenset(feature for nodes in found for feature in nodes.features)
        return found

    def reservations(self) -> tuple[records.NodeReservation, ...]:
        return answers.parse_reservations(self.client.ask(answers.RESERVATIONS))

    def history(self, places: dict[str, Output]) -> dict[str, records.JobState]:
        """``qstat -x``, if kept. A preemptible block that ran and was deleted was preempted."""
        done = self.client.run((*answers.HISTORY, *places))
        if done.returncode == NO_HISTORY:
            raise NoHistory(f'PBS keeps no history: {commands.in_one_line(done.stderr)}')
        if done.returncode not in (0, FINISHED, UNKNOWN):
            said = commands.in_one_line(done.stderr)
            raise commands.SchedulerSilent(f'qstat -x failed with status {done.returncode}: {said}')
        if not done.stdout.strip():
            return {}
        jobs = answers.parse_jobs(done.stdout, self._options.queue)
        return {job.job_id: self._ended(job) for job in jobs}

    def _ended(self, job: records.BatchJob) -> records.JobState:
        deleted = job.state is records.JobState.CANCELLED and job.restarts > 0
        preempted = deleted and self._options.preemptible
        return records.JobState.PREEMPTED if preempted else job.state

    def needs_s(self, shape: BlockShape) -> int:
        """The minimum walltime: blocks are shrink-to-fit jobs."""
        return shape.least_s

    def render(self, shape: BlockShape, place: Output, command: str, worker_init: str = '') -> str:
        return render(self._options, shape, place, command, worker_init)

    def test(self, script: Path) -> None:
        """PBS cannot be asked: qsub submits, or refuses."""

    def submit(self, script: Path) -> str:
        command = ('qsub', '-f', str(script))  # -f: no process of it stays behind
        return self.client.submit(command, r'(\d+(?:\.\S+)?)')

    def cancel(self, job_ids: Sequence[str]) -> None:
        """``qdel``; it leaves processes of a suspended job on its first node: SIGKILL before."""
        if stopped := self._suspended.intersection(job_ids):
            self.client.run(('qsig', '-s', 'SIGKILL', *sorted(stopped)))
        self.client.cancel(('qdel', *job_ids), _OVER)

    def releasable(self, names: Sequence[str]) -> tuple[str, ...]:
        """All but the first, which runs the batch script; none unless the options allow it."""
        asked = self._options.shrink_blocks
        return tuple(names[1:]) if (not self._options.launch if asked is None else asked) else ()

    def shrink(self, job_id: str, keep: Sequence[str], leave: Sequence[str]) -> None:
        """``pbs_release_nodes``. It kills what runs on the nodes that leave."""
        self.client.shrink(('pbs_release_nodes', '-j', job_id, *leave), job_id, leave)
