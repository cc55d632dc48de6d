"""Which waiting jobs of others would start now on nodes of our blocks: pure. The scheduler's queue
is played through as its backfill would: in order of priority, each job gets the first time at which
enough nodes are free for as long as it asks; Slurm first starts jobs strictly in order, up to the
first one that lacks nodes, and plans those that only reservations keep out afterwards. Nodes of
blocks, also of other runs, count as free. A job that starts now and needs nodes of ours for it is a
reason to give them back. All runs find the same: a job gets idle nodes first, then those of as few
blocks as possible. What another run does not give for ``UNWILLING_S`` counts as taken.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from parsl_freetrain.core.model.types import NodeDemand
from parsl_freetrain.sites.batch.block_shape import is_block
from parsl_freetrain.sites.batch.node_windows import HOLDING, held
from parsl_freetrain.sites.batch.queue_play import QueuePlay
from parsl_freetrain.sites.batch.records import BatchJob, JobState, NodeReservation, Nodes

MOST_JOBS = 500  # that are looked at, as Slurm's ``bf_max_job_test``; see competing()
MOST_TASKS = 20  # of one array among them, as Slurm's ``bf_max_job_array_resv``


@dataclass(frozen=True)
class Needs:
    demands: tuple[NodeDemand, ...] = ()  #: the jobs that lack nodes of ours, in order of priority
    #: ids of all jobs that would start now: on idle nodes, or with the help of blocks
    served: frozenset[str] = frozenset()
    #: of these, the jobs that lack nodes of blocks, of ours or of other runs
    lacking: frozenset[str] = frozenset()
    #: ids of the blocks of other runs that have to be given back for them
    asked: frozenset[str] = frozenset()


def waits(job: BatchJob, ours: frozenset[str]) -> bool:
    """Whether a job of others, no run's block, waits for nodes and for nothing else."""
    pending = job.state is JobState.PENDING and not job.blocked
    return pending and job.job_id not in ours and not is_block(job.name)


def could_use(nodes: Iterable[Nodes], jobs: Sequence[BatchJob], ours: frozenset[str]) -> bool:
    """Whether a job of others waits and may get nodes that blocks have, as far as is known."""
    had = held(job for job in jobs if job.job_id in ours)
    here = [(group, names) for group in nodes if (names := had.intersection(group.names))]

    def may_get(job: BatchJob) -> bool:
        return not here or any(
            group.partition in job.partition.split(',')
            and group.have(job.features, job.gpus)
            and names.difference(job.excluded)
            and (job.nodes > len(job.only) or names.intersection(job.only))
            for group, names in here
        )

    return bool(had) and any(waits(job, ours) and may_get(job) for job in jobs)


def shortest_behind_s(jobs: Iterable[BatchJob], ours: frozenset[str]) -> float:
    """The shortest time limit of the waiting jobs behind the first one, or infinite: a scheduler
    that plans the first one for a block's end starts those behind it that end before.
    """
    waiting = sorted((job for job in jobs if waits(job, ours)), key=lambda job: -job.priority)
    return min((j.limit_s for j in waiting[1:] if j.limit_s is not None), default=math.inf)


def needs(
    nodes: Iterable[Nodes],
    jobs: Sequence[BatchJob],
    reservations: Sequence[NodeReservation],
    ours: frozenset[str],
    now: float,
    ignored: frozenset[str] = frozenset(),
    unsuitable: Mapping[str, frozenset[str]] = {},
    unwilling: frozenset[str] = frozenset(),
) -> Needs:
    """The jobs that would start ``now`` if nodes of blocks were given back, and which of ours.
    ``ignored``: something else keeps them; ``unwilling``: blocks of other runs that were not given
    back; ``unsuitable``: the nodes that a job cannot use, although that is not told.
    """
    waiting = sorted(
        (job for job in jobs if waits(job, ours) and job.job_id not in ignored),
        key=lambda job: -job.priority,
    )
    if not waiting:
        return Needs()
    table = QueuePlay(nodes, jobs, reservations, ours, now, unsuitable, unwilling)
    demands: list[NodeDemand] = []
    served: list[str] = []
    kept_out: list[BatchJob] = []
    in_order = True
    each = (job for job in table.competing(waiting) for _ in range(min(job.tasks, MOST_TASKS)))
    for job in islice(each, MOST_JOBS):
        eligible = table.eligible(job)
        begin, free = table.first_time(job, eligible)
        if in_order and begin > now:
            if table.kept_out(job, eligible):
                kept_out.append(job)
                continue
            if len(job.only) < job.nodes:  # or else it holds up nothing but its own nodes
                in_order = False
                for before in kept_out:
                    table.plan(before, *table.first_time(before, table.eligible(before)))
                begin, free = table.first_time(job, eligible)
        if begin > now:
            table.plan(job, begin, free)
            continue
        served.append(job.job_id)
        demands += table.serve(job, eligible, free)
    lacking, asked = frozenset(table.lacking), frozenset(table.asked)
    return Needs(tuple(demands), frozenset(served), lacking, asked)


def reserved(
    jobs: Iterable[BatchJob],
    reservations: Iterable[NodeReservation],
    nodes: Iterable[Nodes],
    ours: frozenset[str],
    by_s: float,
) -> tuple[NodeDemand, ...]:
    """Nodes of ours that a reservation takes before ``by_s``, or that are drained."""
    blocks = [job for job in jobs if job.job_id in ours and job.state in HOLDING]
    demands = []
    for each in reservations:
        if each.start_s < by_s <= each.end_s:
            late = (j.names for j in blocks if j.end_s is None or j.end_s > each.start_s)
            names = frozenset(chain(*late))
            if names := names if each.everywhere else names.intersection(each.nodes):
                name = f'reservation {each.name}'
                demands.append(NodeDemand(name, len(names), names, shared=True))
    drained = chain(*(group.names for group in nodes if group.drained))
    if names := held(blocks).intersection(drained):
        name = f'drained {", ".join(sorted(names))}'
        demands.append(NodeDemand(name, len(names), names, shared=True))
    return tuple(demands)


FORGET_S = 1800.0  # seconds after which an ignored job, or an unsuitable node, counts again
UNWILLING_S = 30.0  # for other runs to give back what jobs need; then their blocks count as jobs


class StalledJobs:
    """Since when jobs could have started. One that waits for what no answer tells (a licence) would
    be given nodes for ever, so after ``limit_s`` it counts as held back otherwise. One that idle
    nodes do not suit (memory) would seem to be served by them, so after half of that they count as
    unsuitable.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, float] = {}
        self._idle: dict[str, tuple[float, frozenset[str]]] = {}
        self._unsuitable: dict[str, tuple[float, frozenset[str]]] = {}
        self._asked: dict[str, float] = {}

    def note(
        self,
        served: Collection[str],
        lacking: Collection[str],
        pending: Collection[str],
        idle: frozenset[str],
        now: float,
        asked: Collection[str] = (),
    ) -> None:
        """Note an answer: ids of jobs and blocks, and nodes beside ours that jobs may begin on."""
        self._asked = {
            block: since
            for block, since in self._asked.items()
            if now - since < FORGET_S and (block in asked or now - since > UNWILLING_S)
        }
        for block in asked:
            self._asked.setdefault(block, now)
        self._since = {
            job: since
            for job, since in self._since.items()
            if job in pending and now - since < FORGET_S and (job in served or self._over(job, now))
        }
        for job in served:
            self._since.setdefault(job, now)
        self._idle = {
            job: (since, names & idle)
            for job in served
            if job not in lacking
            for since, names in [self._idle.get(job, (now, idle))]
        }
        self._unsuitable = {
            job: (since, names)
            for job, (since, names) in self._unsuitable.items()
            if job in pending and now - since < FORGET_S
        }
        for job, (since, names) in self._idle.items():
            if names and now - since > self._limit_s / 2:
                _, before = self._unsuitable.get(job, (now, frozenset[str]()))
                self._unsuitable[job] = now, before | names

    def ignored(self, now: float) -> frozenset[str]:
        return frozenset(job for job in self._since if self._over(job, now))

    def unwilling(self, now: float) -> frozenset[str]:
        """The blocks of other runs that count as ordinary jobs."""
        return frozenset(b for b, since in self._asked.items() if now - since > UNWILLING_S)

    def unsuitable(self) -> Mapping[str, frozenset[str]]:
        """Nodes on which a job, by its id, could have started and did not."""
        return {job: names for job, (_, names) in self._unsuitable.items()}

    def _over(self, job: str, now: float) -> bool:
        return now - self._since[job] > self._limit_s
