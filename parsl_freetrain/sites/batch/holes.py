"""Which nodes can be had until when: pure arithmetic on what the scheduler has said.

A node that is idle, or planned for a job that waits, can be had until the first of: the start that the scheduler plans for a
waiting job on it, and the start of a reservation of it. Nodes that can be had equally long make one hole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from parsl_freetrain.core.words import Hole
from parsl_freetrain.sites.batch.records import Job, Nodes, Partition, Reservation

USABLE = ('idle', 'planned')
# A planned node is idle; older versions mark it so instead of naming the state.
_HARMLESS_MARKS = '-'


@dataclass(frozen=True)
class Wanted:
    """Which nodes blocks can use: ``features`` is a choice of sets of which one must be there; ``gpus`` on each node."""

    partition: str
    features: tuple[frozenset[str], ...] = ()
    gpus: int = 0

    def fits(self, nodes: Nodes) -> bool:
        return (nodes.partition == self.partition and nodes.state in USABLE and not nodes.marks.strip(_HARMLESS_MARKS)
                and nodes.gpus >= self.gpus and (not self.features or any(f <= set(nodes.features) for f in self.features)))


@dataclass(frozen=True)
class OnTheWay:
    """A block that was asked for and has no nodes yet; ``end_s``: when it ends at the latest, infinite if it may last."""

    nodes: int
    end_s: float


def windows(nodes: Iterable[Nodes], jobs: Iterable[Job], reservations: Iterable[Reservation], wanted: Wanted,
            ours: frozenset[str], now: float) -> dict[str, float]:
    """Until when each usable node can be had, in seconds of ``time.time()``; infinite where nothing is planned.

    Parameters
    ----------
    ours
        Ids of our own jobs, which stand in nobody's way.
    now
        A node whose time is up is left out.

    Notes
    -----
    A waiting job with an expected start but without planned nodes (it waits for a date, or another version of Slurm) may
    get any node of its partition: it bounds them all.
    """
    members: dict[str, set[str]] = defaultdict(set)
    until = {name: math.inf if group.until_s is None else group.until_s for group in nodes if wanted.fits(group) for name in group.names}
    for job in jobs:
        if job.state != 'PENDING' or job.start_s is None or job.job_id in ours:
            continue
        if job.planned:
            bounded: Iterable[str] = job.planned
        else:
            if not members:
                members.update(_members(nodes))
            bounded = set().union(*(members[partition] for partition in job.partition.split(',')))
        for name in bounded:
            if name in until:
                until[name] = min(until[name], job.start_s)
    for reservation in reservations:
        if reservation.end_s > now:
            for name in reservation.nodes:
                if name in until:
                    until[name] = min(until[name], reservation.start_s)
    return {name: end for name, end in until.items() if end > now}


def _members(nodes: Iterable[Nodes]) -> Mapping[str, set[str]]:
    members: dict[str, set[str]] = defaultdict(set)
    for group in nodes:
        members[group.partition].update(group.names)
    return members


def holes(windows: Mapping[str, float], on_the_way: Sequence[OnTheWay], partition: Partition, now: float,
          margin_s: float, least_s: float) -> tuple[Hole, ...]:
    """The holes that are left beside the blocks on their way, the longest first.

    Parameters
    ----------
    margin_s
        Holes end so long before their nodes are needed, in seconds.
    least_s
        Shorter holes are left out, in seconds.

    Returns
    -------
    tuple of Hole
        ``until_s`` is None where nothing is planned; no hole has more nodes than a job of the partition may have.
    """
    if not partition.up:
        return ()
    groups: dict[float, list[str]] = defaultdict(list)
    for name, end in windows.items():
        groups[end].append(name)
    for names in groups.values():
        names.sort()
    for block in sorted(on_the_way, key=lambda b: (-b.end_s, -b.nodes)):
        _take(groups, block)
    found = []
    for end, names in sorted(groups.items(), reverse=True):
        until = end - margin_s
        if until - now < least_s:
            continue
        most = partition.most_nodes or max(1, len(names))
        for first in range(0, len(names), most):
            part = tuple(names[first:first + most])
            if len(part) >= partition.least_nodes:
                found.append(Hole(len(part), until if math.isfinite(until) else None, partition.name, part))
    return tuple(found)


def _take(groups: dict[float, list[str]], block: OnTheWay) -> None:
    """The scheduler may place a block on any node that is free long enough: count the shortest such windows as taken."""
    missing = block.nodes
    ends = sorted(groups)
    for end in [e for e in ends if e >= block.end_s] + [e for e in reversed(ends) if e < block.end_s]:
        while missing and groups[end]:
            groups[end].pop()
            missing -= 1
