"""Slurm as a scheduler: which command answers which question."""

import logging
import math
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch import records
from parsl_freetrain.sites.batch import scheduler_commands as commands
from parsl_freetrain.sites.batch.block_shape import BlockShape, Output
from parsl_freetrain.sites.batch.demand import waits
from parsl_freetrain.sites.batch.node_windows import Wanted
from parsl_freetrain.sites.batch.scheduler import NoHistory
from parsl_freetrain.sites.slurm import answers_json, answers_text
from parsl_freetrain.sites.slurm.options import SlurmOptions
from parsl_freetrain.sites.slurm.script import render
from parsl_freetrain.sites.slurm.words import end_of

logger = logging.getLogger(__name__)

# The site config replaces these variables. An account is kept, since users set it for all jobs.
_MEDDLING = ('SQUEUE_', 'SINFO_', 'SBATCH_', 'SCANCEL_', 'SACCT_', 'SCONTROL_')
_OF_JOBS = ('SLURM_', 'SRUN_')  # also of one that this process runs in: blocks would inherit them
_KEPT = ('SBATCH_ACCOUNT', 'SLURM_CONF', 'SLURM_CLUSTERS', 'SLURM_JWT')
# Whole task lists of arrays; not the jobs and nodes of a federation's other clusters.
_ENVIRONMENT = {'SLURM_TIME_FORMAT': '%s', 'SLURM_BITSTR_LEN': '0'}
_ENVIRONMENT |= {f'{command}_LOCAL': '1' for command in ('SQUEUE', 'SINFO', 'SCONTROL', 'SACCT')}
_TIER = 2.0**32  # above every priority


class Slurm:
    label = 'Slurm'
    step_s = 60
    script_mode = 0o600
    nodes_every_s = math.inf
    history_every_s = 60.0

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        meddling = (*_MEDDLING, *(_OF_JOBS if 'SLURM_JOB_ID' in os.environ else ()))
        self.client = commands.Commands('Slurm', options.command_s, kept | _ENVIRONMENT, meddling)
        self._user = commands.own_name()
        self._exits: dict[str, int] = {}  # of failed jobs, as of wait
        self._tiers: dict[str, int] = {}  # of partitions
        self._gpus: dict[str, list[str]] = {}  # of waiting jobs, as they were told last
        self._kinds: set[tuple[str, int, tuple[str, ...]]] = set()  # of nodes
        self._shrinks = options.shrink_blocks
        self._config: str | None = None

    def queue(self) -> records.Partition:
        partitions = answers_text.parse_partitions(self.client.ask(answers_text.PARTITIONS))
        self._tiers = {name: partition.tier for name, partition in partitions.items()}
        if self._config is None:
            self._config = self.client.run(answers_text.CONFIG).stdout
        if self._shrinks is None:
            self._shrinks = answers_text.can_shrink(self._config)
        hidden = re.search(r'^PrivateData\s*=.*\bjobs\b', self._config, re.MULTILINE) is not None
        return replace(partition_for(self._options, partitions), jobs_hidden=hidden)

    def wanted(self) -> Wanted:
        given = self._options
        return Wanted(given.partition, given.features(), given.gpus_per_node, given.classes)

    def jobs(self) -> tuple[records.BatchJob, ...]:
        if self._options.form == 'json':
            jobs = answers_json.parse_jobs(self.client.ask(answers_json.JOBS))
        else:
            jobs = self._jobs_as_text()
        memory = re.search(r'^SelectTypeParameters\s*=.*MEMORY', self._config or '', re.MULTILINE)
        shared = (answers_text.as_it_shares(job, memory is not None) for job in jobs)
        return tuple(
            self._ranked(job) if job.state is records.JobState.PENDING else job for job in shared
        )

    def _jobs_as_text(self) -> tuple[records.BatchJob, ...]:
        """The queue, in a format that nobody else knows, and how our jobs have ended."""
        form = answers_text.job_format(secrets.token_hex(8))
        said = self.client.ask(answers_text.JOBS, SQUEUE_FORMAT=form)
        return self._with_ends(self._with_gpus(answers_text.parse_jobs(said)))

    def _with_gpus(self, jobs: Sequence[records.BatchJob]) -> Sequence[records.BatchJob]:
        """Each waiting job with the GPUs that its text does not tell, which is asked about once."""
        unsaid = {answers_text.queued_as(job.job_id) for job in jobs if self._gpus_matter(job)}
        if not self._gpus.keys() >= unsaid:
            try:
                self._gpus = answers_text.parse_gpus(self.client.ask(answers_text.GPUS))
            except commands.SchedulerSilent as error:  # no reason to know nothing of jobs
                logger.info('Slurm does not tell GPUs of whole jobs: %s', error)
        return answers_text.with_gpus(jobs, self._gpus)

    def _gpus_matter(self, job: records.BatchJob) -> bool:
        """Whether GPUs that are not told may decide which nodes serve a waiting job."""
        among = job.partition.split(',')
        gpus = [gpus for partition, gpus, _ in self._kinds if partition in among]
        unsaid = not job.gpus and waits(job, frozenset())
        return unsaid and any(gpus) and (job.cpus > 0 or len(gpus) > 1)

    def _ranked(self, job: records.BatchJob) -> records.BatchJob:
        tier = max(self._tiers.get(name, 0) for name in job.partition.split(','))
        return replace(job, priority=job.priority + _TIER * tier)

    def _with_ends(self, jobs: Sequence[records.BatchJob]) -> tuple[records.BatchJob, ...]:
        """Each of this user's jobs that has failed, with how it ended; asked about once."""
        failed = {
            j.job_id for j in jobs if j.state is records.JobState.FAILED and j.user == self._user
        }
        self._exits = {job_id: code for job_id, code in self._exits.items() if job_id in failed}
        if new := sorted(failed - self._exits.keys()):
            question = *answers_text.EXITS, f'--jobs={",".join(new)}'
            found = answers_text.parse_exits(self.client.ask(question, accepted=(0, 1)))
            self._exits |= {job_id: found.get(job_id, 0) for job_id in new}
        return tuple(
            replace(job, state=end_of(job.state, code >> 8, code & 0x7F))
            if (code := self._exits.get(job.job_id))
            else job
            for job in jobs
        )

    def nodes(self) -> tuple[records.Nodes, ...]:
        found = answers_text.parse_nodes(self.client.ask(answers_text.NODES))
        self._kinds = {(nodes.partition, nodes.gpus, nodes.features) for nodes in found}
        if not self._options.classes:
            return found
        return tuple(replace(n, node_class=self._options.class_of(n.features)) for n in found)

    def reservations(self) -> tuple[records.NodeReservation, ...]:
        return answers_text.parse_reservations(self.client.ask(answers_text.RESERVATIONS))

    def history(self, places: dict[str, Output]) -> dict[str, records.JobState]:
        question = *answers_text.HISTORY, f'--jobs={",".join(places)}'
        try:
            return answers_text.parse_history(self.client.ask(question))
        except (commands.SchedulerSilent, BadInput) as error:
            if 'disabled' in str(error) or isinstance(error, BadInput):
                raise NoHistory(f'Slurm has no accounting database: {error}') from error
            raise

    def needs_s(self, shape: BlockShape) -> int:
        """The walltime, or its minimum: Slurm plans with that where a job has no deadline."""
        return shape.least_s if shape.deadline is None else shape.walltime_s

    def render(self, shape: BlockShape, place: Output, command: str, worker_init: str = '') -> str:
        return render(self._options, shape, place, command, worker_init)

    def test(self, script: Path) -> None:
        done = self.client.run(('sbatch', '--test-only', str(script)))
        if done.returncode:
            raise self.client.refused(done)

    def submit(self, script: Path) -> str:
        return self.client.submit(('sbatch', '--parsable', str(script)), r'(\d+)(?:;\S+)?')

    def cancel(self, job_ids: Sequence[str]) -> None:
        """``scancel``, which does not complain about jobs that are over."""
        self.client.cancel(('scancel', '--quiet', *job_ids))

    def releasable(self, names: Sequence[str]) -> tuple[str, ...]:
        """All but the first, which runs the batch script; none unless that is allowed."""
        return tuple(names[1:]) if self._shrinks else ()

    def shrink(self, job_id: str, keep: Sequence[str], leave: Sequence[str]) -> None:
        """``scontrol update``. It kills what runs on the nodes that leave."""
        with tempfile.TemporaryDirectory(prefix='freetrain-') as folder:  # for its own scripts
            command = 'scontrol', 'update', f'JobId={job_id}', f'NodeList={",".join(keep)}'
            self.client.shrink(command, job_id, leave, folder)


def partition_for(
    options: SlurmOptions, partitions: Mapping[str, records.Partition]
) -> records.Partition:
    """The options' partition; BadInput if missing, refused to us, or unfit for the mode."""
    partition = commands.offered('Slurm', 'partition', options.partition, partitions)
    why, limit_s = '', math.inf if partition.longest_s is None else partition.longest_s
    for what, given, taken in (
        ('account', options.account, partition.accounts),
        ('QOS', options.qos, partition.qos),
    ):
        if given and taken and given not in taken:
            why = f'does not take the {what} {given!r}; it takes {", ".join(taken)}'
    if options.account and options.account in partition.denied_accounts:
        why = f'does not take the account {options.account!r}; name another account or partition'
    elif partition.most_nodes == 0:
        why = 'starts no jobs (its MaxNodes is 0); name another partition'
    elif limit_s < 60:
        why = f'has a time limit of {limit_s:g} s; a block needs at least one minute'
    elif options.longest_s is not None and options.longest_s > limit_s:
        longest = f'longest_s is {options.longest_s:g}; it must not be more'
        why = f'has a time limit of {limit_s:g} s, and {longest}'
    elif options.preemptible and partition.preempt_mode == 'OFF' and options.qos is None:
        why = (
            "is not preemptible (its PreemptMode is OFF), and mode is 'preemptible'; name a "
            "partition or a QOS that may be preempted, or use mode 'backfill'"
        )
    if why:
        raise BadInput(f'The partition {partition.name!r} {why}.')
    return partition
