"""A scheduler in a package of its own: one queue of IBM Spectrum LSF (10.1), by its manual."""

import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.options import BatchOptions, Option, Word
from parsl_freetrain.sites.batch.records import (
    BatchJob,
    JobState,
    NodeReservation,
    Nodes,
    NotUnderstood,
    Partition,
)
from parsl_freetrain.sites.batch.scheduler import NoHistory
from parsl_freetrain.sites.batch.scheduler_commands import Commands
from parsl_freetrain.sites.batch.shell import batch_script, run_with_launcher, until_deadline
from parsl_freetrain.sites.batch.site import BatchSite
from parsl_freetrain.sites.registry import SiteType

_STATES = {
    'PEND': JobState.PENDING,
    'PSUSP': JobState.HELD,
    'WAIT': JobState.HELD,
    'PROV': JobState.STARTING,
    'RUN': JobState.RUNNING,
    'USUSP': JobState.SUSPENDED,
    'SSUSP': JobState.SUSPENDED,
    'DONE': JobState.COMPLETED,
}
_REASONS = {
    'TERM_RUNLIMIT': JobState.TIMED_OUT,
    'TERM_PREEMPT': JobState.PREEMPTED,
    'TERM_OWNER': JobState.CANCELLED,
    'TERM_ADMIN': JobState.CANCELLED,
    'TERM_MEMLIMIT': JobState.OUT_OF_MEMORY,
}
_JOB_FIELDS = 'jobid stat queue nreq_slot run_time runtimelimit exec_host user job_name exit_reason'
JOBS = ('bjobs', '-u', 'all', '-a', '-json', '-o', _JOB_FIELDS)
HOSTS = ('bhosts', '-json', '-o', 'host_name status njobs')
QUEUES = ('bqueues', '-json', '-o', 'queue_name status')


class LsfOptions(BatchOptions, frozen=True, kw_only=True):
    """One queue of a machine with LSF, whose hosts have one slot for each block.

    Attributes
    ----------
    queue
        Where blocks are submitted.
    bsub_options
        More options of bsub, each complete.
    """

    queue: Word
    bsub_options: tuple[Option, ...] = ()


class Lsf:
    """Which command answers which question."""

    label = 'LSF'
    step_s = 60
    script_mode = 0o600
    nodes_every_s = 0.0
    history_every_s = 60.0

    def __init__(self, options: LsfOptions) -> None:
        self._options = options
        self.client = Commands('LSF', options.command_s, meddling=('LSB_DEFAULT',))

    def _records(self, command: Sequence[str]) -> list[dict[str, Any]]:
        answer = self.client.ask(command)
        try:
            records: list[dict[str, Any]] = json.loads(answer)['RECORDS']
        except (ValueError, KeyError, TypeError) as error:
            raise NotUnderstood(f'{command[0]} answered {answer[:200]!r}: {error}') from error
        return records

    def queue(self) -> Partition:
        """The queue."""
        queues = {queue['QUEUE_NAME']: queue for queue in self._records(QUEUES)}
        if self._options.queue not in queues:
            raise BadInput(f'LSF has no queue {self._options.queue!r}; it has {", ".join(queues)}.')
        return Partition(
            self._options.queue, up=queues[self._options.queue]['STATUS'] == 'Open:Active'
        )

    def wanted(self) -> Wanted:
        """Any host."""
        return Wanted(self._options.queue)

    def jobs(self) -> tuple[BatchJob, ...]:
        """``bjobs``, which also shows jobs that ended in the last hour."""
        now = time.time()
        return tuple(_job(record, now) for record in self._records(JOBS))

    def nodes(self) -> tuple[Nodes, ...]:
        """``bhosts``: hosts without a job are idle."""
        return tuple(
            Nodes(
                self._options.queue,
                (host['HOST_NAME'],),
                'idle' if (host['STATUS'], host['NJOBS']) == ('ok', '0') else host['STATUS'],
            )
            for host in self._records(HOSTS)
        )

    def reservations(self) -> tuple[NodeReservation, ...]:
        """Not asked for in this example."""
        return ()

    def history(self, places: dict[str, Output]) -> dict[str, JobState]:
        raise NoHistory('bjobs shows a job for an hour after its end')

    def needs_s(self, shape: BlockShape) -> int:
        return shape.walltime_s

    def render(self, shape: BlockShape, place: Output, command: str, worker_init: str = '') -> str:
        """A script for bsub."""
        directives = [
            f'-J {place.name}',
            f'-o {shlex.quote(place.stdout)}',
            f'-e {shlex.quote(place.stderr)}',
            f'-q {self._options.queue}',
            f'-n {shape.nodes} -R span[ptile=1] -x',
            f'-W {shape.walltime_s // 60}',
            *self._options.bsub_options,
        ]
        if self._options.account is not None:
            directives.append(f'-P {self._options.account}')
        launcher = run_with_launcher(['blaunch', '-z', 'HOSTS'], command, 10.0)
        return batch_script(
            (f'#BSUB {line}' for line in directives),
            self._options,
            worker_init,
            f'left=$(({shape.walltime_s} - SECONDS))\n{until_deadline(shape.deadline)}',
            launcher.replace('-z HOSTS', '-z "$LSB_HOSTS"'),
        )

    def test(self, script: Path) -> None:
        """LSF cannot be asked: bsub submits, or refuses."""

    def submit(self, script: Path) -> str:
        """``bsub``, with the options that stand in the script."""
        lines = script.read_text().splitlines()
        options = [
            word
            for line in lines
            if line.startswith('#BSUB ')
            for word in shlex.split(line.removeprefix('#BSUB '))
        ]
        return self.client.submit(
            ('bsub', *options, '/bin/bash', str(script)), r'Job <(\d+)> is submitted.*'
        )

    def cancel(self, job_ids: Sequence[str]) -> None:
        """``bkill``."""
        self.client.cancel(('bkill', *job_ids), ('job has already finished',))


def _job(record: dict[str, Any], now: float) -> BatchJob:
    state = _STATES.get(record['STAT'], JobState.UNKNOWN)
    if record['STAT'] == 'EXIT':
        state = _REASONS.get(record['EXIT_REASON'].partition(':')[0], JobState.FAILED)
    start_s = end_s = None
    if state is JobState.RUNNING:
        start_s = now - float(record['RUN_TIME'].split()[0])
        end_s = start_s + 60 * float(record['RUNTIMELIMIT'].split('/')[0])
    hosts = tuple(dict.fromkeys(record['EXEC_HOST'].split(':')))
    return BatchJob(
        record['JOBID'],
        state,
        record['QUEUE'],
        int(record['NREQ_SLOT']),
        start_s,
        end_s,
        names=hosts if state in (JobState.RUNNING, JobState.SUSPENDED) else (),
        user=record['USER'],
        name=record['JOB_NAME'],
    )


class LsfSite(BatchSite):
    """One queue of a machine with LSF."""

    name, job_variable = 'lsf', 'LSB_JOBID'
    options_type, scheduler_type = LsfOptions, Lsf
    options: LsfOptions


SITE_TYPE = SiteType(
    'lsf',
    'LSF',
    LsfSite,
    LsfOptions,
    programs=('bsub', 'bjobs', 'bkill', 'bhosts', 'bqueues'),
    version=('bsub', '-V'),
)
