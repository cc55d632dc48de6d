"""Divides all offered node-seconds by their use and its cause."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from parsl_freetrain.core.model.state import History, RunState
from parsl_freetrain.report import timeline
from parsl_freetrain.report.timeline import Interval, intersect, length, merge, subtract

NAMES = {
    ('starting', 'block'): 'block starting',
    ('starting', 'fragment'): 'fragment starting',
    ('lost', 'preempted'): 'lost to preemptions',
    ('lost', 'failed'): 'lost to failures',
    ('idle', 'joined'): 'idle in a block',
    ('idle', 'outside'): 'idle without a block',
}
"""What a class is called where it has several causes."""

WHY = {
    ('trained', ''): 'turned into training',
    ('checkpointing', ''): 'training stood still while a checkpoint was copied or written',
    ('starting', 'block'): 'a block had been asked for, and the node had not joined yet',
    (
        'starting',
        'fragment',
    ): 'a fragment had been given the node, and had not made its first step yet',
    (
        'lost',
        'preempted',
    ): 'trained, but kept by no checkpoint and no rank when the nodes were taken',
    ('lost', 'failed'): 'trained, but not kept when the fragment failed',
    ('idle', 'joined'): 'the node had joined, and no trainer could use it or was given it',
    ('idle', 'outside'): 'no block had the node: none asked for, none granted, or no trainer left',
}
"""By class of a node-second and cause: an explanation."""


@dataclass(frozen=True)
class Cause:
    """The node-seconds of one class, for one reason; ``kind`` and ``cause`` as in :data:`WHY`."""

    kind: str
    cause: str
    why: str
    node_s: float

    @property
    def name(self) -> str:
        return NAMES.get((self.kind, self.cause), self.kind)


def causes(history: History, now: float | None = None) -> tuple[Cause, ...]:
    """All offered node-seconds by use (see :func:`node_seconds_of`) and cause, in the order of
    :data:`WHY`. ``now``: end of the account of a live run, in epoch seconds; default: its last
    entry.
    """
    totals = dict.fromkeys(WHY, 0.0)

    def divide(kind: str, mine: list[Interval], where: list[Interval], *causes: str) -> None:
        parts = intersect(mine, merge(where)), subtract(mine, merge(where))
        for cause, part in zip(causes, parts, strict=True):
            totals[kind, cause] += length(part)

    for run in history.runs:
        until = history.until(run, now)
        doing = timeline.busy(history, run, until)
        joined, failed = _joined(run, until), _failed(history, run, until)
        for name, rest in timeline.offered(run, until).items():
            for kind in timeline.BUSY_CLASSES:
                mine = intersect(merge(doing[name][kind]) if name in doing else [], rest)
                rest = subtract(rest, mine)
                if kind == 'lost':
                    divide(kind, mine, failed[name], 'failed', 'preempted')
                elif kind == 'starting':
                    divide(kind, mine, joined[name], 'fragment', 'block')
                else:
                    totals[kind, ''] += length(mine)
            divide('idle', rest, joined[name], 'joined', 'outside')
    return tuple(Cause(kind, cause, why, totals[kind, cause]) for (kind, cause), why in WHY.items())


def node_seconds_of(history: History, now: float | None = None) -> dict[str, float]:
    """What became of every second of every node that was offered. ``now``: as in :func:`causes`.

    Node-seconds: ``offered``, and its parts ``trained``, ``starting`` (a block's node before it
    joined, a fragment before its first step), ``checkpointing``, ``lost`` (in a fragment that was
    preempted or failed, after what its checkpoints, and ranks that were left, kept for the next
    one) and ``idle``. The parts add up to ``offered``; what a node did outside an offer, or after
    the end of the run, counts nowhere. A second with overlapping records counts once.
    """
    totals = dict.fromkeys(('offered', 'trained', 'starting', 'checkpointing', 'lost', 'idle'), 0.0)
    for cause in causes(history, now):
        totals[cause.kind] += cause.node_s
        totals['offered'] += cause.node_s
    return totals


def _joined(run: RunState, until: float) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = defaultdict(list)
    for node in run.nodes.values():
        found[node.name].append((node.joined_at, timeline.left_at(run, node, until)))
    return found


def _failed(history: History, run: RunState, until: float) -> dict[str, list[Interval]]:
    alive, parts_of = history.alive(run), timeline.phases_of(history, run, until)
    found: dict[str, list[Interval]] = defaultdict(list)
    for fragment in run.fragments.values():
        if timeline.ending_of(fragment, alive) == 'failed':
            for node in fragment.nodes:
                place = run.nodes.get(node)
                found[node if place is None else place.name] += parts_of[fragment.key]['lost']
    return found
