"""The present state of a run, computed from the ledger, as data for the live view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from parsl_freetrain.core.allocation.answer import Allocator, relative_gap
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FINAL_STATES, FragmentRow, RunHistory, RunRow, TrainerRow
from parsl_freetrain.ledger.summary import efficiency
from parsl_freetrain.ledger.timeline import ending_of
from parsl_freetrain.report.life import Liveness, life_of
from parsl_freetrain.report.limits import LimitNow, limits_of
from parsl_freetrain.report.names import run_named
from parsl_freetrain.report.shape_speeds import USED, shape_of


@dataclass(frozen=True)
class TrainerNow:
    """One trainer.

    ``samples``: as last reported. ``rate``: samples per second (None while no fragment runs).
    ``finish_s``: expected seconds until its total, at its mean speed since submission (None:
    unknown, or it has ended). ``why``: why it ended. ``shape``: how its ranks share the work on its
    nodes (None: no nodes, or no shapes).
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
    """One open block: nodes requested and joined, its trainers, seconds left (None: unknown)."""

    name: str
    nodes: int
    joined: int
    trainers: tuple[str, ...]
    left_s: float | None


NEVER = Liveness('ended')


@dataclass(frozen=True)
class DecisionNow:
    """The last decision: ``ago_s`` seconds since, the solver and how it ended, and by what share of
    its worth a better decision could be better at most (None: not known).
    """

    ago_s: float
    status: str
    solver: str
    gap: float | None


@dataclass(frozen=True)
class RunStatus:
    """A run, with its trainers' counts summed over all runs of the ledger up to it.

    ``elapsed_s``: since the run began. ``silent_s``: since its last entry. ``ended``: how it ended;
    None if it is running or died. ``life``: its state.
    """

    run: str = ''
    command: str = ''
    life: Liveness = NEVER
    elapsed_s: float = 0.0
    silent_s: float = 0.0
    ended: str | None = None
    trainers: tuple[TrainerNow, ...] = ()
    blocks: tuple[BlockNow, ...] = ()
    decision: DecisionNow | None = None
    limits: tuple[LimitNow, ...] = ()


def snapshot(
    reader: Reader, now: float, allocator: Allocator | None = None, named: str | None = None
) -> RunStatus:
    """The state at ``now`` (epoch seconds). Efficiencies are None without an allocator, which must
    be exact. Raises BadInput if the ledger has no run whose name begins with ``named``.
    """
    history = reader.history()
    name = run_named([run.name for run in history.runs], named)
    if not history.runs:
        return RunStatus()
    run = next((run for run in history.runs if run.name == name), history.runs[-1])
    until = history.until(run, now)
    gains = efficiency(reader, now, allocator, run=name).by_trainer if allocator else {}
    life = life_of(history, run, reader.about(run), now)
    fragments: dict[str, list[FragmentRow]] = defaultdict(list)
    for fragment in history.fragments:
        if fragment.run <= run.id:
            fragments[fragment.trainer].append(fragment)
    going = life.state in ('running', 'silent')
    used = reader.events(run.name, [USED]) if going else []
    return RunStatus(
        run=run.name,
        command=run.command,
        life=life,
        elapsed_s=until - run.begun_at,
        silent_s=max(0.0, now - run.last_at) if going else 0.0,
        ended=None if run.ended_at is None else run.how or 'ended',
        trainers=tuple(
            _trainer(t, fragments[t.name], run, going, until, gains.get(t.name), used)
            for t in history.trainers
            if t.run == run.id
        ),
        blocks=_blocks(history, run, now) if going else (),
        decision=_last_decision(reader, run, now) if going else None,
        limits=limits_of(reader, history, run, now, going),
    )


def as_document(seen: RunStatus) -> dict[str, Any]:
    """The document of ``freetrain status --json``."""
    document = asdict(seen)
    life = document.pop('life')
    return {**document, 'state': life['state'], 'note': life['sentence']}


def _last_decision(reader: Reader, run: RunRow, now: float) -> DecisionNow | None:
    for row in reader.recent_decisions(run, 1):
        gap = relative_gap(row['objective'], row['bound'])
        return DecisionNow(now - row['at'], row['status'], row['solver'], gap)
    return None


def _trainer(
    row: TrainerRow,
    fragments: list[FragmentRow],
    run: RunRow,
    going: bool,
    now: float,
    gain: float | None,
    used: list[dict[str, Any]],
) -> TrainerNow:
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
        rate=sum(f.rate or 0.0 for f in running)
        if any(f.rate is not None for f in running)
        else None,
        efficiency=gain,
        fragments=len(fragments),
        preempted=endings.count('preempted'),
        rescaled=sum(len(a.nodes) != len(b.nodes) for a, b in pairwise(fragments)),
        finish_s=_finish_s(row, samples, now) if going and row.state not in FINAL_STATES else None,
        why=row.why,
        shape=shape_of(used, running[-1]) if running else None,
    )


def _finish_s(row: TrainerRow, samples: int, now: float) -> float | None:
    trained = samples - row.first_samples
    if row.total_samples is None or trained <= 0 or now <= row.submitted_at:
        return None
    return max(0, row.total_samples - samples) * (now - row.submitted_at) / trained


def _loss(metrics: Mapping[str, Any]) -> float | None:
    value = metrics.get('loss')
    return float(value) if isinstance(value, int | float) else None


def _blocks(history: RunHistory, run: RunRow, now: float) -> tuple[BlockNow, ...]:
    here = {n.node: n.block for n in history.nodes if n.run == run.id and n.left_at is None}
    trainers: dict[str, dict[str, None]] = defaultdict(dict)
    deadlines: dict[str, float] = {}
    for fragment in history.fragments:
        if fragment.run != run.id or fragment.ended_at is not None:
            continue
        on = {here[n] for n in fragment.nodes if n in here}
        for block in on:
            trainers[block][fragment.trainer] = None
        if fragment.deadline is not None and len(on) == 1:
            deadlines[on.pop()] = fragment.deadline
    found = []
    for row in history.blocks:
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
