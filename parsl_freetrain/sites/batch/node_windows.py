"""Which nodes can be had until when, by what the scheduler has said: an idle node until the start
of a waiting job planned on it, or of a reservation. Nodes alike and equally long make one hole.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from parsl_freetrain.core.model.types import Hole, NodeOffer
from parsl_freetrain.sites.batch import records

# They have nodes, and keep them.
HOLDING = records.JobState.RUNNING, records.JobState.STARTING, records.JobState.SUSPENDED

Groups = dict[tuple[float, str], list[str]]  # nodes by when they can be had until, and class


@dataclass(frozen=True)
class Wanted:
    """Which nodes blocks can use: all of one set of ``features``, ``gpus``, a class."""

    partition: str
    features: tuple[frozenset[str], ...] = ()
    gpus: int = 0
    classes: tuple[str, ...] = ()

    def fits(self, nodes: records.Nodes) -> bool:
        return (
            nodes.partition == self.partition
            and nodes.usable
            and nodes.have(self.features, self.gpus)
            and (not self.classes or nodes.node_class in self.classes)
        )

    def lacking(self, nodes: Iterable[records.Nodes]) -> str:
        """Why no node of the queue can be used, now or whatever its state; empty: some can."""
        here = [group for group in nodes if group.partition == self.partition and group.names]
        if fit := [group for group in here if group.have(self.features, self.gpus)]:
            states = ', '.join(sorted({group.state + group.marks for group in fit}))
            down = all(group.broken for group in fit)
            return f'no node of the queue {self.partition!r} is up: {states}' if down else ''
        none = f'no node of the queue {self.partition!r} has'
        if here and (most := max(group.gpus for group in here)) < self.gpus:
            return f'gpus_per_node is {self.gpus}, and {none} more than {most} GPUs'
        features = ' or '.join('&'.join(sorted(each)) for each in self.features)
        gpus = f' with {self.gpus} GPUs' if self.gpus else ''
        return f'{none} what the site config asks for: {features}{gpus}'.removesuffix(': ')


@dataclass(frozen=True)
class OnTheWay:
    """A block that has no nodes yet. ``end_s``: its latest end (infinite: none); ``node_class``:
    empty: any; it cannot start on nodes that are needed before ``least_end_s``.
    """

    nodes: int
    end_s: float
    node_class: str = ''
    least_end_s: float = 0.0


def windows(
    nodes: Collection[records.Nodes],
    jobs: Iterable[records.BatchJob],
    reservations: Iterable[records.NodeReservation],
    wanted: Wanted,
    ours: frozenset[str],
    now: float,
) -> dict[str, float]:
    """Until when each usable node can be had, in seconds of ``time.time()``; infinite: nothing is
    planned. ``ours``: jobs that do not limit it. A job with an expected start and no planned nodes
    may get any node of its partition, so it limits them all.
    """
    members: dict[str, set[str]] = defaultdict(set)
    for group in nodes:
        members[group.partition].update(group.names)
    until = {
        name: math.inf if group.until_s is None else group.until_s
        for group in nodes
        if wanted.fits(group)
        for name in group.names
    }
    for job in jobs:
        for name in held((job,)):
            until.pop(name, None)
        if job.job_id in ours or job.state is not records.JobState.PENDING or job.start_s is None:
            continue
        places = job.planned or [n for each in job.partition.split(',') for n in members[each]]
        for name in until.keys() & set(places):
            until[name] = min(until[name], job.start_s)
    for reservation in reservations:
        if reservation.end_s > now:
            for name in until.keys() & (until if reservation.everywhere else reservation.nodes):
                until[name] = min(until[name], reservation.start_s)
    return {name: end for name, end in until.items() if end > now}


def held(jobs: Iterable[records.BatchJob]) -> frozenset[str]:
    """Nodes of jobs that are not over, as far as is known."""
    return frozenset(name for job in jobs if not job.state.is_over for name in job.names)


def freed(had: frozenset[str], jobs: Sequence[records.BatchJob]) -> frozenset[str]:
    """Nodes that jobs ``had`` and now have no more; none while a job's nodes are not known."""
    unknown = records.JobState.UNKNOWN
    lost = any(job.state is unknown and not job.names for job in jobs)
    return frozenset() if lost else had - held(jobs)


def as_jobs_say(
    nodes: Sequence[records.Nodes], freed: Collection[str]
) -> tuple[records.Nodes, ...]:
    """Nodes of which some were ``freed`` by all of their jobs since they were said to be busy."""
    found = []
    for group in nodes:
        idle = () if group.broken or group.usable else [n for n in group.names if n in freed]
        if idle:
            found.append(replace(group, names=tuple(idle), state='idle', marks=''))
        if rest := tuple(name for name in group.names if name not in idle):
            found.append(replace(group, names=rest))
    return tuple(found)


def holes(
    windows: Mapping[str, float],
    on_the_way: Sequence[OnTheWay],
    partition: records.Partition,
    now: float,
    margin_s: float,
    least_s: float,
    classes: Mapping[str, str] | None = None,
) -> tuple[Hole, ...]:
    """The holes that the blocks on their way leave free, the longest first; none has more nodes
    than a job of the partition may have. ``margin_s``: how long before its nodes are needed a hole
    ends; ``least_s``: its minimum length; ``classes``: by node name; None: all are alike.
    """
    if not partition.up:
        return ()
    classes = classes or {}
    groups: Groups = defaultdict(list)
    for name, end in windows.items():
        groups[end, classes.get(name, '')].append(name)
    for names in groups.values():
        names.sort()
    for block in sorted(on_the_way, key=lambda b: (-b.end_s, -b.nodes)):
        _take(groups, block)
    found = []
    for (end, node_class), names in sorted(groups.items(), reverse=True):
        until = end - margin_s
        if until - now < least_s:
            continue
        most = partition.most_nodes or max(1, len(names))
        for first in range(0, len(names), most):
            part = tuple(names[first : first + most])
            if len(part) >= partition.least_nodes:
                until_s = until if math.isfinite(until) else None
                found.append(Hole(len(part), until_s, partition.name, part, node_class))
    return tuple(found)


def _take(groups: Groups, block: OnTheWay) -> None:
    """Count as taken the shortest windows that are long enough for a block: it may get any."""
    missing = block.nodes
    keys = [key for key in sorted(groups) if block.node_class in ('', key[1])]
    long = [k for k in keys if k[0] >= block.end_s]
    for key in long + [k for k in reversed(keys) if block.least_end_s <= k[0] < block.end_s]:
        while missing and groups[key]:
            groups[key].pop()
            missing -= 1


class OfferLog:
    """Answers as intervals: a node was there between two that are at most 3 ``poll_s`` apart, and
    for ``poll_s`` seconds after the last one, when the next is due.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s, self._gap_s = poll_s, 3 * poll_s
        self._offers: list[NodeOffer] = []
        self._open: dict[str, NodeOffer] = {}

    def note(self, at: float, names: Iterable[str]) -> None:
        """At this time, in seconds of ``time.time()``, exactly these nodes are idle or ours."""
        there = set(names)
        for name, offer in list(self._open.items()):
            near = at - offer.end <= self._gap_s
            if name not in there or not near:
                self._offers.append(NodeOffer(name, offer.start, at if near else offer.end))
                del self._open[name]
        for name in there:
            start = self._open[name].start if name in self._open else at
            self._open[name] = NodeOffer(name, start, at)

    def between(self, since: float, until: float) -> tuple[NodeOffer, ...]:
        """All intervals, clipped to these times in seconds of ``time.time()``."""
        due = until - self._poll_s
        opened = (replace(o, end=until) if o.end > due else o for o in self._open.values())
        clipped = (
            NodeOffer(o.node, max(since, o.start), min(until, o.end))
            for o in (*self._offers, *opened)
        )
        return tuple(offer for offer in clipped if offer.end > offer.start)
