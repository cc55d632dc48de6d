"""What each node did in each second, as sets of intervals, by use and cause; pure."""

import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parsl_freetrain.core.model.state import Fragment, History, Node, RunState

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(left: list[Interval], right: list[Interval]) -> list[Interval]:
    return subtract(left, subtract(left, right))


def subtract(left: list[Interval], right: list[Interval]) -> list[Interval]:
    rest: list[Interval] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    return merge((max(a, start), min(b, end)) for a, b in intervals)


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def levels(changes: Iterable[tuple[float, int]], grid: Sequence[float]) -> list[int]:
    """The sum of (moment, change) pairs up to each moment of the grid, its own changes included."""
    ordered = sorted(changes)
    moments = [x for x, _ in ordered]
    heights = [0]
    for _, change in ordered:
        heights.append(heights[-1] + change)
    return [heights[bisect_right(moments, x)] for x in grid]


BUSY_CLASSES = ('lost', 'checkpointing', 'trained', 'starting')
"""Classes of a node-second; where records overlap, the first counts. The rest is idle."""

LOSING = frozenset({'preempted', 'failed'})  # endings after which work may be repeated
Phases = dict[str, list[Interval]]


class Clock:
    """Seconds since the first run's start, runs one behind the other."""

    def __init__(self, history: History, now: float | None) -> None:
        self.until = {r.id: history.until(r, now) for r in history.runs}
        self._begun = {r.id: r.began.at for r in history.runs}
        self._offset: dict[int, float] = {}
        self.length = 0.0
        for run in history.runs:
            self._offset[run.id] = self.length
            self.length += self.until[run.id] - run.began.at
        self.joints = [self._offset[r.id] for r in history.runs[1:]]

    def of(self, run: int, at: float) -> float:
        """An epoch second of a run, as this clock shows it; within the run."""
        begun = self._begun[run]
        return self._offset[run] + min(max(at, begun), self.until[run]) - begun


def ending_of(fragment: Fragment, alive: bool) -> str | None:
    """How it ended; 'preempted' for one without an end whose run is over (not ``alive``)."""
    if fragment.ended is None:
        return None if alive else 'preempted'
    return fragment.ending


def phases_of(history: History, run: RunState, until: float) -> dict[tuple[int, str, int], Phases]:
    """By fragment: its seconds, each in one class; without an end, until ``until`` (epoch)."""
    alive = history.alive(run)
    # What survivors hold in memory counts as far as the next fragment that started went on from it.
    used: dict[str, float] = defaultdict(lambda: math.inf if alive else 0.0)
    found: dict[tuple[int, str, int], Phases] = {}
    for fragment in reversed(run.fragments.values()):
        kept = min(fragment.samples or 0, used[fragment.trainer])
        found[fragment.key] = _phases(fragment, kept, until, alive)
        if fragment.started_samples is not None:
            used[fragment.trainer] = fragment.started_samples
    return found


def _phases(fragment: Fragment, kept: float, until: float, alive: bool) -> Phases:
    begin = fragment.launched.at
    end = max(begin, until if fragment.ended_at is None else fragment.ended_at)
    started = end if fragment.started_at is None else min(max(begin, fragment.started_at), end)
    kept_until = end
    if ending_of(fragment, alive) in LOSING:
        kept_until = _kept_until(fragment, kept, started, end)
    saving = clip((c.pause for c in fragment.checkpoints), started, kept_until)
    return {
        'starting': merge([(begin, started)]),
        'checkpointing': saving,
        'trained': subtract(merge([(started, kept_until)]), saving),
        'lost': merge([(kept_until, end)]),
    }


def _kept_until(fragment: Fragment, kept: float, started: float, end: float) -> float:
    """When a fragment that was lost had trained the last of the ``kept`` samples."""
    # What was trained while a checkpoint was written beside it is not in it.
    at = min(end, max([started, *(c.pause[1] for c in fragment.checkpoints)]))
    samples = max([fragment.started_samples or 0, *(c.samples for c in fragment.checkpoints)])
    last = fragment.seen
    reports = [] if last is None else [(last.at, last.samples)]
    if fragment.reached is not None:
        reports.append((end, fragment.reached))
    for seen_at, seen in reports:
        if kept <= samples or seen <= samples:
            continue
        seen_at = min(end, max(at, seen_at))
        pace = (seen - samples) / (seen_at - at) if seen_at > at else math.inf
        if seen_at == end and last is not None and last.rate:
            pace = max(pace, last.rate)  # its end is noted some time after its last step
        at, samples = min(seen_at, at + (kept - samples) / pace), seen
    return at


def offered(run: RunState, until: float) -> dict[str, list[Interval]]:
    spells: dict[str, list[Interval]] = defaultdict(list)
    for offer in run.offers.values():
        spells[offer.node].append((offer.start, offer.end))
    return {name: clip(times, run.began.at, until) for name, times in spells.items()}


def left_at(run: RunState, node: Node, until: float) -> float:
    """When a node was gone: by its own record or its block's, at the latest ``until``."""
    block = run.blocks.get(node.block)
    known = [t for t in (node.left_at, block.closed_at if block else None) if t is not None]
    return min([until, *known])


def busy(history: History, run: RunState, until: float) -> dict[str, Phases]:
    """By node name and class: when it was in a block and not just idle; classes may overlap."""
    found: dict[str, Phases] = defaultdict(lambda: {name: [] for name in BUSY_CLASSES})
    arrived: dict[str, set[str]] = defaultdict(set)
    for node in run.nodes.values():
        arrived[node.block].add(node.name)
        if (block := run.blocks.get(node.block)) is not None:
            found[node.name]['starting'].append((block.opened.at, node.joined_at))
    for block in run.blocks.values():
        closed = until if block.closed_at is None else block.closed_at
        for name in set(block.opened.request.names) - arrived[block.name]:
            found[name]['starting'].append((block.opened.at, closed))
    parts_of = phases_of(history, run, until)
    for fragment in run.fragments.values():
        for one in fragment.nodes:
            place, here = run.nodes.get(one), (-math.inf, math.inf)
            if place is not None:
                here = place.joined_at, left_at(run, place, until)
            for kind, times in parts_of[fragment.key].items():
                found[one if place is None else place.name][kind].extend(clip(times, *here))
    return found


def struck_nodes(run: RunState) -> list[Node]:
    """Nodes of taken blocks whose loss hit a fragment that was training on them."""
    hit: dict[str, Node] = {}
    for fragment in run.fragments.values():
        if fragment.started_at is None:
            continue
        places = [run.nodes[node] for node in fragment.nodes if node in run.nodes]
        for place in _struck(fragment, [(left_at(run, p, math.inf), p) for p in places]):
            block = run.blocks.get(place.block)
            if block is not None and block.how == 'taken':
                hit[place.node] = place
    return list(hit.values())


def _struck(fragment: Fragment, gone: Sequence[tuple[float, Node]]) -> list[Node]:
    # A fragment may end shortly before its nodes go: then the first block to go is what ended it.
    started = fragment.started_at or 0.0
    ended = math.inf if fragment.ended_at is None else fragment.ended_at
    lost_it = fragment.ending in (None, 'preempted')
    here = [(t, p) for t, p in gone if started <= t < math.inf]
    during = [p for t, p in here if t < ended or (t == ended and lost_it)]
    if during or not lost_it:
        return during
    first, place = min(gone, key=lambda pair: pair[0], default=(math.inf, None))
    if place is None or first == math.inf:
        return []
    return [p for _, p in gone if p.block == place.block]


def natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), '') if part.isdigit() else (-1, part) for part in re.split(r'(\d+)', name)]


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
    ('starting', 'fragment'): 'a fragment had the node, and had not made its first step yet',
    ('lost', 'preempted'): 'trained, but kept by no checkpoint and no rank when nodes were taken',
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
    """All offered node-seconds by use and cause, in the order of :data:`WHY`, until ``now``."""
    totals = dict.fromkeys(WHY, 0.0)

    def divide(kind: str, mine: list[Interval], where: list[Interval], *causes: str) -> None:
        parts = intersect(mine, merge(where)), subtract(mine, merge(where))
        for cause, part in zip(causes, parts, strict=True):
            totals[kind, cause] += length(part)

    for run in history.runs:
        until = history.until(run, now)
        doing = busy(history, run, until)
        joined, failed = _joined(run, until), _failed(history, run, until)
        for name, rest in offered(run, until).items():
            for kind in BUSY_CLASSES:
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
    """What became of every second of every node that was offered, until ``now`` (as
    :func:`causes`). ``starting``: a block's node before it joined, a fragment before its first
    step; ``lost``: in a fragment that was preempted or failed, after what was kept for the next
    one. The parts add up.
    """
    totals = dict.fromkeys(('offered', 'trained', 'starting', 'checkpointing', 'lost', 'idle'), 0.0)
    for cause in causes(history, now):
        totals[cause.kind] += cause.node_s
        totals['offered'] += cause.node_s
    return totals


def _joined(run: RunState, until: float) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = defaultdict(list)
    for node in run.nodes.values():
        found[node.name].append((node.joined_at, left_at(run, node, until)))
    return found


def _failed(history: History, run: RunState, until: float) -> dict[str, list[Interval]]:
    alive, parts_of = history.alive(run), phases_of(history, run, until)
    found: dict[str, list[Interval]] = defaultdict(list)
    for fragment in run.fragments.values():
        if ending_of(fragment, alive) == 'failed':
            for node in fragment.nodes:
                place = run.nodes.get(node)
                found[node if place is None else place.name] += parts_of[fragment.key]['lost']
    return found
