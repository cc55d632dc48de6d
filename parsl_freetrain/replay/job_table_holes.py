"""From a job table to holes, and what could be known of them by EASY backfill (Lifka 1995)."""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.job_table import JobTable
from parsl_freetrain.replay.trace import Floats, Ints, Trace

# A waiting job that fits the idle nodes for longer is held back by something not in the log.
PATIENCE_S = 300.0
# Because of clocks that disagree and replaced nodes, logs use slightly more nodes than there are.
OVERBOOKED_SHARE = 0.01

_END, _SUBMIT, _START = range(3)


def holes(jobs: JobTable, patience_s: float = PATIENCE_S) -> Trace:
    """The idle intervals of a machine from its jobs, with the promises of EASY backfill. If the log
    names no nodes, a job takes first those without a promise, then those whose promise ends first,
    so that a reserved job does not take nodes that its reservation left alone. The head of the
    queue is the waiting job that was submitted first; one that would fit the idle nodes but is not
    started for ``patience_s`` seconds is passed over: something else holds it back. A promise holds
    from when it is made; after it a new one is made as soon as possible. Raises BadInput if more
    than 1 % of the used node-seconds are on nodes that the machine does not have (below this, jobs
    share nodes).
    """
    sweep = _Sweep(jobs, patience_s)
    for at, events in _instants(jobs, sweep.wake_ups):
        sweep.step(at, events)
    return sweep.trace()


def _instants(
    jobs: JobTable, wake_ups: list[float]
) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Every instant of the window with its events: ends come before submissions and starts."""
    last = jobs.window[1]
    ran = np.flatnonzero((jobs.end > jobs.start) & np.isfinite(jobs.end))
    everyone = np.arange(len(jobs))
    times = np.concatenate([jobs.end[ran], jobs.submit, jobs.start])
    kinds = np.repeat([_END, _SUBMIT, _START], [len(ran), len(jobs), len(jobs)])
    which = np.concatenate([ran, everyone, everyone])
    order = np.lexsort((which, kinds, times))
    order = order[times[order] <= last]
    at, cuts = np.unique(times[order], return_index=True)
    events = list(zip(kinds[order].tolist(), which[order].tolist(), strict=True))
    bounds = [*cuts.tolist(), len(events)]
    for i, t in enumerate(at.tolist()):
        while wake_ups and wake_ups[0] <= t:
            woken = heapq.heappop(wake_ups)
            while wake_ups and wake_ups[0] == woken:
                heapq.heappop(wake_ups)
            if woken < t:
                yield woken, []
        yield t, events[bounds[i] : bounds[i + 1]]


class _Sweep:
    def __init__(self, jobs: JobTable, patience_s: float) -> None:
        self.jobs, self.patience_s = jobs, patience_s
        self.wake_ups: list[float] = []
        count = len(jobs.machine)
        self.since, self.until = jobs.window
        self.jobs_on = np.zeros(count, dtype=np.int64)
        # For idle nodes: start of their present interval.
        self.idle_since = np.full(count, self.since)
        # For idle nodes: end of the promise; none if not after idle_since.
        self.promised = np.full(count, self.since)
        self.idle = np.ones(count, dtype=np.bool_)
        self.on: dict[int, Ints] = {}  # nodes of the running jobs
        self.expected: list[tuple[float, int]] = []  # latest end of each running job
        # In order of submission; since when each has fitted, if it fits.
        self.waiting: dict[int, float] = {}
        self.rows: list[tuple[Floats, Ints, Floats, float]] = []
        self.lacking_s = 0.0

    def step(self, at: float, events: list[tuple[int, int]]) -> None:
        for kind, job in events:
            if kind == _END:
                self._end(at, job)
            elif kind == _SUBMIT:
                self.waiting[job] = math.nan
            else:
                del self.waiting[job]
                if self.jobs.end[job] > self.jobs.start[job]:
                    self._start(at, job)
        if at >= self.since:
            self._promise(at)

    def _end(self, at: float, job: int) -> None:
        nodes = self.on.pop(job)
        del self.expected[bisect_left(self.expected, (self._over_at(job), job))]
        self.jobs_on[nodes] -= 1
        freed = nodes[self.jobs_on[nodes] == 0]
        self.idle[freed] = True
        self.idle_since[freed] = at
        self.promised[freed] = at

    def _start(self, at: float, job: int) -> None:
        named = self.jobs.placed[job]
        nodes = self._choose(job) if named is None else named
        self.on[job] = nodes
        insort(self.expected, (self._over_at(job), job))
        self.jobs_on[nodes] += 1
        taken = nodes[self.idle[nodes]]
        self._close(at, taken)
        self.idle[taken] = False

    def _choose(self, job: int) -> Ints:
        free = np.flatnonzero(self.idle)
        wanted = int(self.jobs.nodes[job])
        if wanted > len(free):
            return np.sort(np.concatenate([free, self._shared(job, wanted - len(free))]))
        return np.sort(free[np.argsort(self.promised[free], kind='stable')[:wanted]])

    def _shared(self, job: int, lacking: int) -> Ints:
        """Busy nodes for a job that needs more than the free ones: those that become free first."""
        jobs = self.jobs
        chosen: dict[int, float] = {}
        for other in sorted(self.on, key=lambda other: (float(jobs.end[other]), other)):
            end = min(float(jobs.end[other]), float(jobs.end[job]), self.until)
            overlap_s = end - float(jobs.start[job])
            chosen |= {node: overlap_s for node in self.on[other].tolist() if node not in chosen}
            if len(chosen) >= lacking:
                break
        shared = list(chosen)[:lacking]
        self.lacking_s += sum(chosen[node] for node in shared)
        ran = np.minimum(jobs.end, self.until) - np.minimum(jobs.start, self.until)
        if self.lacking_s > OVERBOOKED_SHARE * float((ran * jobs.nodes).sum()):
            raise BadInput(
                f'{jobs.path}, line {jobs.line[job]}: the job starts on {jobs.nodes[job]} nodes '
                f'when {jobs.nodes[job] - lacking} of {len(jobs.machine)} are free, and more such; '
                'the machine must have more nodes, or the log must name the nodes that jobs share.'
            )
        return np.array(shared, dtype=np.int64)

    def _over_at(self, job: int) -> float:
        return float(self.jobs.start[job] + self.jobs.requested[job])

    def _close(self, at: float, nodes: Ints) -> None:
        """End the intervals of these nodes now; intervals of no length are dropped."""
        nodes = nodes[self.idle_since[nodes] < at]
        if len(nodes):
            self.rows.append((self.idle_since[nodes], nodes, self.promised[nodes], at))

    def _promise(self, at: float) -> None:
        """Make promises for the idle nodes that have none or whose promise has run out."""
        reservation = self._reservation(at, int(self.idle.sum()))
        asking = np.flatnonzero(self.idle & (self.promised <= at))
        if not len(asking):
            return
        kept = self.promised[self.idle & (self.promised > at)]
        given = promises(reservation, len(asking), kept, at)
        # A node that had no promise and gets none keeps its interval.
        new = (given > at) | (self.promised[asking] > self.idle_since[asking])
        asking, given = asking[new], given[new]
        self._close(at, asking)
        self.idle_since[asking] = at
        self.promised[asking] = given
        if len(given) and at < given[0] < math.inf:
            heapq.heappush(self.wake_ups, float(given[0]))

    def _reservation(self, at: float, idle: int) -> 'Reservation':
        for job, fits_since in self.waiting.items():
            needed = int(self.jobs.nodes[job])
            if needed > len(self.idle):  # it can never start
                continue
            if needed > idle:
                self.waiting[job] = math.nan
            elif fits_since != fits_since:
                self.waiting[job] = at
                heapq.heappush(self.wake_ups, at + self.patience_s)
            elif at - fits_since >= self.patience_s:
                continue
            expected = ((end, len(self.on[running])) for end, running in self.expected)
            return reserve(needed, idle, expected, at)
        return NOTHING_RESERVED

    def trace(self) -> Trace:
        self._close(self.until, np.flatnonzero(self.idle))
        if not self.rows:
            raise BadInput(f'{self.jobs.path}: no node was ever idle; there is nothing to replay.')
        ends = np.repeat([row[3] for row in self.rows], [len(row[1]) for row in self.rows])
        starts, nodes, known = (np.concatenate([row[i] for row in self.rows]) for i in range(3))
        self.rows.clear()  # a year has millions of intervals
        return Trace(self.jobs.machine, self.since, self.until, starts, ends, nodes, known)


@dataclass(frozen=True)
class Reservation:
    """Of the first waiting job: its start (or infinite), and ``extra`` nodes then."""

    shadow_s: float
    extra: int


NOTHING_RESERVED = Reservation(math.inf, 0)


def reserve(
    needed: int, idle: int, expected: Iterable[tuple[float, int]], now: float
) -> Reservation:
    """A job's reservation; ``expected``: latest end (or now) and nodes of running jobs."""
    free, shadow_s = idle, now
    for end, nodes in expected:
        if free >= needed and end > shadow_s:
            break
        free += nodes
        shadow_s = max(end, now)
    return Reservation(shadow_s, free - needed) if free >= needed else NOTHING_RESERVED


def promises(reservation: Reservation, asking: int, kept: Floats, now: float) -> Floats:
    """Until when the reservation leaves ``asking`` nodes alone; extra ones for ever."""
    if reservation.shadow_s == math.inf:
        return np.full(asking, math.inf)
    beyond = max(reservation.extra - int((kept > reservation.shadow_s).sum()), 0)
    found = np.full(asking, max(reservation.shadow_s, now))
    found[max(asking - beyond, 0) :] = math.inf
    return found
