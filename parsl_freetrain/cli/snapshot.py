"""What is going on now, as data for the live view; computed from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from parsl_freetrain.core.allocation import Allocator
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FragmentRow, Run, Story, TrainerRow
from parsl_freetrain.ledger.summary import efficiency
from parsl_freetrain.ledger.timeline import ending_of


@dataclass(frozen=True)
class TrainerNow:
    """One trainer. ``samples`` as far as seen, ``rate`` in samples per second (None while nothing runs)."""

    name: str
    state: str
    nodes: int
    samples: int
    total: int | None
    loss: float | None
    rate: float | None
    efficiency: float | None
    fragments: int
    preempted: int
    rescaled: int


@dataclass(frozen=True)
class BlockNow:
    """One open block: nodes asked for and joined, who trains on it, seconds left (None: unknown)."""

    name: str
    nodes: int
    joined: int
    trainers: tuple[str, ...]
    left_s: float | None


@dataclass(frozen=True)
class Snapshot:
    """The newest run, with its trainers' counts over all runs of the ledger.

    ``elapsed_s``: since the run began; ``silent_s``: since it last noted anything; ``ended``: how it ended, None
    if it goes on.
    """

    elapsed_s: float = 0.0
    silent_s: float = 0.0
    ended: str | None = None
    trainers: tuple[TrainerNow, ...] = ()
    blocks: tuple[BlockNow, ...] = ()


def snapshot(reader: Reader, now: float, allocator: Allocator | None = None) -> Snapshot:
    """The state at ``now`` (epoch seconds); efficiencies are None without an (exact) allocator."""
    story = reader.story()
    if not story.runs:
        return Snapshot()
    run = story.runs[-1]
    until = story.until(run, now)
    gains = efficiency(reader, now, allocator) if allocator is not None else {}
    fragments: dict[str, list[FragmentRow]] = defaultdict(list)
    for fragment in story.fragments:
        fragments[fragment.trainer].append(fragment)
    going = run.ended_at is None
    return Snapshot(
        elapsed_s=until - run.begun_at,
        silent_s=max(0.0, now - run.last_at) if going else 0.0,
        ended=None if going else run.how or 'ended',
        trainers=tuple(
            _trainer(t, fragments[t.name], run, going, gains.get(t.name)) for t in story.trainers if t.run == run.id
        ),
        blocks=_blocks(story, run, now) if going else (),
    )


def _trainer(row: TrainerRow, fragments: list[FragmentRow], run: Run, going: bool, gain: float | None) -> TrainerNow:
    running = [f for f in fragments if f.run == run.id and f.ended_at is None] if going else []
    last_seen: Mapping[str, Any] = next((f.metrics for f in reversed(fragments) if f.metrics), {})
    endings = [ending_of(f, f.run == run.id and going) for f in fragments]
    return TrainerNow(
        name=row.name,
        state=row.state,
        nodes=sum(len(f.nodes) for f in running),
        samples=max([row.samples, *(f.seen_samples or 0 for f in running)]),
        total=row.total_samples,
        loss=_loss(last_seen),
        rate=sum(f.rate or 0.0 for f in running) if any(f.rate is not None for f in running) else None,
        efficiency=gain,
        fragments=len(fragments),
        preempted=endings.count('preempted'),
        rescaled=sum(len(a.nodes) != len(b.nodes) for a, b in pairwise(fragments)),
    )


def _loss(metrics: Mapping[str, Any]) -> float | None:
    value = metrics.get('loss')
    return float(value) if isinstance(value, int | float) else None


def _blocks(story: Story, run: Run, now: float) -> tuple[BlockNow, ...]:
    here = {n.node: n.block for n in story.nodes if n.run == run.id and n.left_at is None}
    trainers: dict[str, dict[str, None]] = defaultdict(dict)
    deadlines: dict[str, float] = {}
    for fragment in story.fragments:
        if fragment.run != run.id or fragment.ended_at is not None:
            continue
        on = {here[n] for n in fragment.nodes if n in here}
        for block in on:
            trainers[block][fragment.trainer] = None
        if fragment.deadline is not None and len(on) == 1:
            deadlines[on.pop()] = fragment.deadline
    found = []
    for row in story.blocks:
        if row.run != run.id or row.closed_at is not None:
            continue
        until = row.until if row.until is not None else deadlines.get(row.block)
        found.append(
            BlockNow(
                row.block,
                row.nodes,
                sum(block == row.block for block in here.values()),
                tuple(trainers[row.block]),
                None if until is None else until - now,
            )
        )
    return tuple(found)
