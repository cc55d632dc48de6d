"""What is going on now, as data for the live view; computed from the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from parsl_freetrain.cli.liveness import Life, life_of
from parsl_freetrain.cli.where import run_named
from parsl_freetrain.core.allocation import Allocator
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FINAL_STATES, FragmentRow, Run, Story, TrainerRow
from parsl_freetrain.ledger.summary import efficiency
from parsl_freetrain.ledger.timeline import ending_of


@dataclass(frozen=True)
class TrainerNow:
    """One trainer.

    ``samples`` as far as seen, ``rate`` in samples per second (None while nothing runs), ``finish_s`` in how many seconds it will have
    its total if it gets on as it has since it was submitted (None: unknown, or it is over), ``why`` it ended, ``shape`` how its ranks share
    the work on these nodes (None: it has no nodes, or no shapes).
    """

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
    finish_s: float | None = None
    why: str = ''
    shape: str | None = None


@dataclass(frozen=True)
class BlockNow:
    """One open block: nodes asked for and joined, who trains on it, seconds left (None: unknown)."""

    name: str
    nodes: int
    joined: int
    trainers: tuple[str, ...]
    left_s: float | None


NEVER = Life('ended')


@dataclass(frozen=True)
class Snapshot:
    """A run, the newest unless another one was named, with its trainers' counts over all runs of the ledger up to it.

    ``elapsed_s``: since the run began; ``silent_s``: since it last noted anything; ``ended``: how it ended, None
    if it goes on or nobody ended it; ``life``: which of these.
    """

    run: str = ''
    command: str = ''
    life: Life = NEVER
    elapsed_s: float = 0.0
    silent_s: float = 0.0
    ended: str | None = None
    trainers: tuple[TrainerNow, ...] = ()
    blocks: tuple[BlockNow, ...] = ()


def snapshot(reader: Reader, now: float, allocator: Allocator | None = None, named: str | None = None) -> Snapshot:
    """The state at ``now`` (epoch seconds); efficiencies are None without an (exact) allocator.

    Raises
    ------
    BadInput
        The ledger has no run whose name begins with ``named``.
    """
    story = reader.story()
    name = run_named([run.name for run in story.runs], named)
    if not story.runs:
        return Snapshot()
    run = next((run for run in story.runs if run.name == name), story.runs[-1])
    until = story.until(run, now)
    gains = efficiency(reader, now, allocator, run=name) if allocator is not None else {}
    life = life_of(story, run, reader.about(run), now)
    fragments: dict[str, list[FragmentRow]] = defaultdict(list)
    for fragment in story.fragments:
        if fragment.run <= run.id:
            fragments[fragment.trainer].append(fragment)
    going = life.state in ('running', 'silent')
    return Snapshot(
        run=run.name,
        command=run.command,
        life=life,
        elapsed_s=until - run.begun_at,
        silent_s=max(0.0, now - run.last_at) if going else 0.0,
        ended=None if run.ended_at is None else run.how or 'ended',
        trainers=tuple(
            _trainer(t, fragments[t.name], run, going, until, gains.get(t.name)) for t in story.trainers if t.run == run.id
        ),
        blocks=_blocks(story, run, now) if going else (),
    )


def as_document(seen: Snapshot) -> dict[str, Any]:
    """The snapshot as JSON has it: what ``freetrain status --json`` prints."""
    document = asdict(seen)
    life = document.pop('life')
    return {**document, 'state': life['state'], 'note': life['sentence']}


def _trainer(row: TrainerRow, fragments: list[FragmentRow], run: Run, going: bool, now: float, gain: float | None) -> TrainerNow:
    running = [f for f in fragments if f.run == run.id and f.ended_at is None] if going else []
    last_seen: Mapping[str, Any] = next((f.metrics for f in reversed(fragments) if f.metrics), {})
    endings = [ending_of(f, f.run == run.id and going) for f in fragments]
    samples = max([row.samples, *(f.seen_samples or 0 for f in running)])
    interrupted = not going and row.state not in FINAL_STATES
    nodes = sum(len(f.nodes) for f in running)
    return TrainerNow(
        name=row.name,
        state='interrupted' if interrupted else row.state,
        nodes=nodes,
        samples=samples,
        total=row.total_samples,
        loss=_loss(last_seen),
        rate=sum(f.rate or 0.0 for f in running) if any(f.rate is not None for f in running) else None,
        efficiency=gain,
        fragments=len(fragments),
        preempted=endings.count('preempted'),
        rescaled=sum(len(a.nodes) != len(b.nodes) for a, b in pairwise(fragments)),
        finish_s=_finish_s(row, samples, now) if going and row.state not in FINAL_STATES else None,
        why=row.why,
        shape=row.spec.get('shapes', {}).get(str(nodes)),
    )


def _finish_s(row: TrainerRow, samples: int, now: float) -> float | None:
    trained = samples - row.first_samples
    if row.total_samples is None or trained <= 0 or now <= row.submitted_at:
        return None
    return max(0, row.total_samples - samples) * (now - row.submitted_at) / trained


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
