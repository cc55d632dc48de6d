"""The queue as if no block had nodes: which are free for a job, and when, in shares too."""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from itertools import chain
from operator import or_

from parsl_freetrain.core.model.types import NodeDemand
from parsl_freetrain.sites.batch import records as rc
from parsl_freetrain.sites.batch.block_shape import is_block
from parsl_freetrain.sites.batch.node_shares import Caps, Missing, NodeCalendar, NodeShares
from parsl_freetrain.sites.batch.node_windows import held

ENDING_S = 60.0  # nodes of a job that has been ending for so long, in seconds, do not count as free
SOON_S = 3.0  # a reservation that ends in so many seconds counts as over


class QueuePlay:
    """When each node is free. Sets of nodes are integers, one bit for each node."""

    def __init__(
        self,
        nodes: Iterable[rc.Nodes],
        jobs: Sequence[rc.BatchJob],
        reservations: Sequence[rc.NodeReservation],
        ours: frozenset[str],
        now: float,
        unsuitable: Mapping[str, frozenset[str]],
        unwilling: frozenset[str],
    ) -> None:
        self._now, self._unsuitable = now, unsuitable
        self.lacking: set[str] = set()
        self.asked: set[str] = set()
        self._eligible: dict[tuple[object, ...], int] = {}
        over = {name for r in reservations if r.end_s <= now + SOON_S for name in r.nodes}
        self._bits: dict[str, int] = {}
        self._ours = self._given = 0  # our nodes, and those of all blocks
        self._begun = 0  # those of blocks that jobs got
        self._blocks: dict[str, tuple[float, int]] = {}  # ends and nodes, also of other runs
        # Nodes that a plan without blocks leaves to others, and those of blocks that it takes.
        self._moved: list[tuple[int, int]] = []
        until: dict[str, float] = {}
        self._up = [
            (group, self._set_of(group.names))
            for group in (_without(over, each) for each in nodes)
            if not group.broken
        ]
        up = self._idle = 0
        for group, members in self._up:
            up |= members
            if group.state in rc.USABLE:
                self._idle |= members
                until |= dict.fromkeys(group.names, now)
        uses: list[tuple[rc.BatchJob, int, float]] = []
        for job in jobs:
            if held((job,)):
                end_s = math.inf if job.end_s is None else job.end_s
                if job.state is rc.JobState.ENDING:
                    end_s = now if now - min(end_s, now) < ENDING_S else math.inf
                elif job.job_id in ours or (is_block(job.name) and job.job_id not in unwilling):
                    members = self._set_of(job.names) & up
                    self._blocks[job.job_id] = end_s, members
                    self._given |= members
                    self._ours |= members if job.job_id in ours else 0
                    end_s = now
                else:
                    end_s = max(end_s, now + 1.0)  # it is late, and holds them still
                if end_s > now:
                    uses.append((job, self._set_of(job.names) & up, end_s))
                for name in job.names:
                    until[name] = max(end_s, until.get(name, now))
        ends: dict[float, int] = {}
        for name, end in until.items():
            ends[end] = ends.get(end, 0) | self._set_of((name,))
        # Without nodes of blocks that stand for those that jobs before got, and with them.
        self._calendar, self._beside = NodeCalendar(now, ends), NodeCalendar(now, ends)
        self._stood = 0  # those of blocks that jobs got a part of
        self._shares = self._shares_of(now, uses, until)
        self._taken: list[tuple[float, float, int]] = []
        self._set_apart(now, up, reservations)

    def _set_apart(self, now: float, up: int, reservations: Iterable[rc.NodeReservation]) -> None:
        for r in reservations:
            if r.end_s > now + SOON_S:
                members = up if r.everywhere else self._set_of(r.nodes)
                self._reserve(members, r.start_s, r.end_s)
        self._set_aside = list(self._taken)
        # Nodes that a reservation or a planned job takes later: fewer jobs can use them meanwhile.
        self._spare = self._any_of(members for begin, _, members in self._taken if begin > now)

    def _shares_of(
        self, now: float, uses: list[tuple[rc.BatchJob, int, float]], known: Mapping[str, float]
    ) -> NodeShares | None:
        """What is left of each node; None unless jobs share some, and it is known how far."""
        if not any(group.mixed and group.cpus for group, _ in self._up):
            return None
        total = {self._bits[n]: group for group, _ in self._up for n in group.names if group.cpus}
        unknown = self._set_of(n for group, _ in self._up for n in group.names if n not in known)
        return NodeShares(now, total, uses, unknown)

    def competing(self, waiting: Iterable[rc.BatchJob]) -> list[rc.BatchJob]:
        """The jobs that could get blocks' nodes (or else idle ones), or nodes of such jobs."""
        may = [(job, self.eligible(job)) for job in waiting]
        reach, before = self._given or self._idle, 0
        while reach != before:
            before = reach
            for members in {members for _, members in may}:
                reach |= members if members & reach else 0
        return [job for job, members in may if members & reach]

    def eligible(self, job: rc.BatchJob) -> int:
        want = (job.partition, job.features, job.gpus)
        if want not in self._eligible:
            partitions = job.partition.split(',')
            self._eligible[want] = self._any_of(
                names
                for group, names in self._up
                if group.partition in partitions and group.have(job.features, job.gpus)
            )
        refused = (*job.excluded, *self._unsuitable.get(job.job_id, ()))
        return self._eligible[want] & ~self._set_of(refused)

    def first_time(self, job: rc.BatchJob, eligible: int) -> tuple[float, int]:
        """When enough of these nodes, named ones too, are first free; infinite: never."""
        named, length_s = self._set_of(job.only), _length_s(job)
        if self._shares and job.cpus:
            return self._shares.first_time(job, eligible, named, length_s)
        return self._beside.first_time(eligible, job.nodes, named, length_s)

    def _caps(self, job: rc.BatchJob, free: int, begin: float) -> Caps | None:
        """The CPUs that a job could have of each node; None where it gets whole nodes."""
        if self._shares is None or not job.cpus:
            return None
        return self._shares.caps(job, free, begin, _length_s(job))

    def plan(self, job: rc.BatchJob, begin: float, free: int) -> None:
        """A job gets nodes ``free`` when it begins: the told ones, unless because of blocks."""
        if begin == math.inf:
            return
        named, told = self._set_of(job.only), self._set_of(job.planned) & free
        caps = self._caps(job, free, begin)
        got = Missing(job, caps).first_of(chain((named,), self._least_useful_first(free, told)))
        # Nodes of blocks that the scheduler does not count as free then.
        freed = got & self._any_of(names for end, names in self._blocks.values() if end > begin)
        if freed:
            self._moved.append((told & ~got, freed))
        else:
            got = Missing(job, caps).first_of((named, told, free))
        self._reserve(got, begin, begin + _length_s(job), job=job, caps=caps)
        self._spare |= got

    def serve(self, job: rc.BatchJob, eligible: int, free: int) -> Iterator[NodeDemand]:
        """The job starts now on some of the nodes that are free for it; what it lacks for that."""
        named, length_s = self._set_of(job.only), _length_s(job)
        # Those included that jobs before got.
        among = self._calendar.free(eligible, self._now, length_s) & self._ours
        caps = self._caps(job, free, self._now)
        missing = Missing(job, caps)
        got = missing.first_of((named, free & ~self._given, free & self._stood))
        for members in (free & self._given & self._spare, free & self._given):
            got |= self._of_few_blocks(members & ~got, missing)
        # Which others of ours it gets is decided elsewhere: any of them stand for these here.
        given = got & self._given
        hides = self._hides(got) & ~given
        self._reserve(got & ~given, self._now, self._now + length_s, given, job=job, caps=caps)
        if given | hides:
            self.lacking.add(job.job_id)
            theirs = (given | hides) & ~self._ours
            self.asked |= {block for block, (_, had) in self._blocks.items() if had & theirs}
        own, hides = given & self._ours & ~self._stood, hides & self._ours
        self._stood |= 0 if caps is None else given
        for lacking, of in ((own & named, named), (own & ~named, ~named)):
            if lacking:
                sets = among & of, among & of & self._spare, lacking
                names, spare, first = map(self._names, sets)
                yield NodeDemand(job.job_id, lacking.bit_count(), names, spare, first=first)
        if hides:
            names = self._names(hides)
            yield NodeDemand(job.job_id, len(names), names, shared=True)

    def _of_few_blocks(self, among: int, missing: Missing) -> int:
        """What is missing, of these nodes of as few blocks as possible: of blocks that jobs before
        got, then of the smallest that has enough, or of that with the most; as a scheduler takes
        nodes.
        """
        chosen = 0
        while missing and among & ~chosen:
            useful = [
                (members & self._begun == 0, missing.beyond(use), size, use & -use, use)
                for _, members in self._blocks.values()
                if (use := members & among & ~chosen) and (size := members.bit_count())
            ]
            chosen |= missing.first_of((min(useful)[-1],))
        self._begun |= chosen
        return chosen

    @staticmethod
    def _any_of(sets: Iterable[int]) -> int:
        return reduce(or_, sets, 0)

    def _least_useful_first(self, free: int, told: int) -> Iterator[int]:
        """Nodes that nobody can have now, then those that are soonest taken again."""
        now = self._calendar.free(free, self._now, 0.0)
        taken = (free & each for _, end, each in self._taken if end > self._now)
        for members in chain((free & ~now,), taken, (free,)):
            yield from (members & told, members)

    def _hides(self, got: int) -> int:
        """Nodes of blocks because of which another job is planned there; each once."""
        hides = self._any_of(freed for moved, freed in self._moved if moved & got)
        self._moved = [(moved, freed) for moved, freed in self._moved if not moved & got]
        return hides

    def kept_out(self, job: rc.BatchJob, eligible: int) -> bool:
        """Whether reservations alone keep a job from starting now."""
        for begin, end, members in self._set_aside:
            if begin < self._now + _length_s(job) and self._now < end:
                eligible &= ~members
        return eligible.bit_count() < job.nodes or bool(self._set_of(job.only) & ~eligible)

    def _reserve(
        self,
        members: int,
        begin: float,
        end: float,
        own: int = 0,
        job: rc.BatchJob | None = None,
        caps: Caps | None = None,
    ) -> None:
        """Reserve ``members``, and ``own`` for blocks' nodes: shared if the job shares them."""
        if self._shares:
            self._shares.take(begin, end, members | own, None if caps is None else job, caps)
        insort(self._taken, (begin, end, members))
        self._calendar.take(begin, end, members)
        self._beside.take(begin, end, members | own)

    def _names(self, members: int) -> frozenset[str]:
        return frozenset(name for name, bit in self._bits.items() if members >> bit & 1)

    def _set_of(self, names: Iterable[str]) -> int:
        return self._any_of(1 << self._bits.setdefault(n, len(self._bits)) for n in names)


def _length_s(job: rc.BatchJob) -> float:
    return math.inf if job.limit_s is None else job.limit_s


def _without(over: Set[str], group: rc.Nodes) -> rc.Nodes:
    """As nodes will be when the reservation that is ``over`` is."""
    if not over >= set(group.names):
        return group
    state = 'idle' if group.state in rc.SET_ASIDE else group.state
    return replace(group, state=state, marks=group.marks.replace('$', ''))
