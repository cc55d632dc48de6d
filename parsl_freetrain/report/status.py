"""The present state of a run, computed from the ledger, as data for the live view."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from parsl_freetrain.core.allocation.constraints import EVERYBODY
from parsl_freetrain.core.allocation.problem import Allocator, relative_gap
from parsl_freetrain.core.controller.settings import DecisionSettings
from parsl_freetrain.core.model.state import FINAL_STATES, Fragment, History, RunState, Training
from parsl_freetrain.journal.kept_metrics import main_metric
from parsl_freetrain.journal.usage import owners_in, used_until
from parsl_freetrain.report.runs import Liveness, life_of, run_named
from parsl_freetrain.report.summary import efficiency
from parsl_freetrain.report.timeline import ending_of

NEVER = Liveness('ended')


@dataclass(frozen=True)
class TrainerNow:
    name: str
    state: str
    nodes: int
    samples: int  # as last reported
    total: int | None
    metrics: Mapping[str, float]
    rate: float | None  # samples per second; None: no fragment runs
    efficiency: float | None
    fragments: int
    preempted: int
    rescaled: int
    # expected seconds to its total, at its mean speed so far; None: unknown, or it has ended
    finish_s: float | None = None
    why: str = ''  # it ended
    shape: str | None = None  # how its ranks share the work; None: no nodes, or no shapes
    resumes: int = 0  # with verified: as of its last checkpoint
    verified: int = 0
    # of replicas: the rounds that all have ended, how many have ended one more, and of how many
    rounds: tuple[int, int, int] | None = None
    weights_by: int | None = None  # the replica that made the last weights

    @property
    def loss(self) -> float | None:
        return self.metrics.get(main_metric(self.metrics))


@dataclass(frozen=True)
class BlockNow:
    """One open block: nodes requested and joined, its trainers, seconds left (None: unknown)."""

    name: str
    nodes: int
    joined: int
    trainers: tuple[str, ...]
    left_s: float | None


@dataclass(frozen=True)
class DecisionNow:
    ago_s: float
    status: str  # how the solver ended
    solver: str
    gap: float | None  # share of its worth that a better one could gain at most; None: not known


@dataclass(frozen=True)
class LimitNow:
    """A budget (node-seconds, all runs) or share (nodes); ``whose``: 'user NAME' or 'total'."""

    kind: str
    whose: str
    limit: float
    used: float


@dataclass(frozen=True)
class RunStatus:
    """A run, with its trainers' counts summed over all runs up to it; ``silent_s``: since its last
    entry; ``ended``: how; None if it is running or died.
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
    damage: tuple[str, ...] = ()


def snapshot(
    history: History, now: float, allocator: Allocator | None = None, named: str | None = None
) -> RunStatus:
    """The state at ``now``, with U by an exact allocator; BadInput if no run is ``named`` so."""
    name = run_named([run.name for run in history.runs], named)
    if not history.runs:
        return RunStatus()
    run = next((run for run in history.runs if run.name == name), history.runs[-1])
    until = history.until(run, now)
    gains = efficiency(history.of(run.name), now, allocator).by_trainer if allocator else {}
    life = life_of(history, run, now)
    fragments: dict[str, list[Fragment]] = defaultdict(list)
    for one in history.runs:
        if one.id <= run.id:
            for fragment in one.fragments.values():
                fragments[fragment.trainer].append(fragment)
    going = life.state in ('running', 'silent')
    last = run.decisions[-1] if going and run.decisions else None
    gap = relative_gap(last.objective, last.bound) if last else None
    return RunStatus(
        run=run.name,
        command=run.began.command,
        life=life,
        elapsed_s=until - run.began.at,
        silent_s=max(0.0, now - run.last_at) if going else 0.0,
        ended=None if run.ended is None else run.how or 'ended',
        trainers=tuple(
            _trainer(run, run.replicas(one), fragments, going, until, gains.get(name))
            for name, one in run.trainers.items()
            if run.replicas(one)[0] is one
        ),
        blocks=_blocks(run, now) if going else (),
        decision=DecisionNow(now - last.at, last.status, last.solver, gap) if last else None,
        limits=_limits(history, run, now, going),
        damage=tuple(history.damage),
    )


def as_document(seen: RunStatus) -> dict[str, Any]:
    document = asdict(seen)
    for shown, trainer in zip(document['trainers'], seen.trainers, strict=True):
        shown['loss'] = trainer.loss
    life = document.pop('life')
    return {**document, 'state': life['state'], 'note': life['sentence']}


def state_of(training: Training, going: bool) -> str:
    """A trainer's state; 'interrupted' if its run is over but the trainer is not."""
    return training.state if going or training.state in FINAL_STATES else 'interrupted'


def resumes_in_words(trainers: Sequence[TrainerNow]) -> tuple[str, ...]:
    resumes = sum(t.resumes for t in trainers)
    verified = sum(t.verified for t in trainers)
    s = 's' * (resumes != 1)
    return (f'{resumes:,} resume{s}, {verified:,} verified',) if resumes else ()


def _trainer(
    run: RunState,
    replicas: list[Training],
    of: Mapping[str, list[Fragment]],
    going: bool,
    now: float,
    gain: float | None,
) -> TrainerNow:
    training, each = replicas[0], [of[one.name] for one in replicas]
    fragments = sorted((f for mine in each for f in mine), key=lambda f: (f.run, f.launched.at))
    open_ones = [f for one in replicas for f in one.fragments if f.ended is None]
    running = open_ones if going else []
    seen = [f.seen for f in running if f.seen is not None]
    rates = [report.rate for report in seen if report.rate is not None]
    said = next((f.seen.metrics for f in reversed(fragments) if f.seen and f.seen.metrics), {})
    endings = [ending_of(f, f.run == training.run and going) for f in fragments]
    reached = {one.name: one.samples for one in replicas}
    for report in seen:
        reached[report.trainer] = max(reached[report.trainer], report.samples)
    samples = sum(reached.values()) // len(replicas)
    return TrainerNow(
        name=training.name,
        state='running' if running and not training.over else state_of(training, going),
        nodes=sum(len(f.nodes) for f in running),
        samples=samples,
        total=training.trainer.total_samples,
        metrics={k: float(v) for k, v in said.items() if isinstance(v, int | float)},
        rate=sum(rates) if rates else None,
        efficiency=gain,
        fragments=len(fragments),
        preempted=endings.count('preempted'),
        rescaled=sum(len(a.nodes) != len(b.nodes) for mine in each for a, b in pairwise(mine)),
        finish_s=_finish_s(training, samples, now) if going and not training.over else None,
        why=training.why,
        shape=running[-1].shape or None if running else None,
        resumes=sum(one.resumes for one in replicas),
        verified=sum(one.verified for one in replicas),
        rounds=_rounds(replicas, run) if training.trainer.round_samples else None,
        weights_by=training.weights_by,
    )


def _rounds(replicas: list[Training], run: RunState) -> tuple[int, int, int]:
    done = [one.rounds for one in replicas] + [*run.rounds_elsewhere(replicas[0]).values()]
    return min(done), sum(one > min(done) for one in done), len(done)


def _finish_s(training: Training, samples: int, now: float) -> float | None:
    trained, total = samples - training.submitted.samples, training.trainer.total_samples
    if total is None or trained <= 0 or now <= training.submitted.at:
        return None
    return max(0, total - samples) * (now - training.submitted.at) / trained


def _blocks(run: RunState, now: float) -> tuple[BlockNow, ...]:
    here = {n.node: n.block for n in run.nodes.values() if n.left_at is None}
    trainers: dict[str, dict[str, None]] = defaultdict(dict)
    deadlines: dict[str, float] = {}
    for fragment in run.fragments.values():
        if fragment.ended is not None:
            continue
        on = {here[n] for n in fragment.nodes if n in here}
        for block in on:
            trainers[block][fragment.trainer] = None
        if fragment.launched.deadline_s is not None and len(on) == 1:
            deadlines[on.pop()] = fragment.launched.deadline_s
    found = []
    for name, row in run.blocks.items():
        if row.closed_at is None:
            until = row.until if row.until is not None else deadlines.get(name)
            joined = sum(where == name for where in here.values())
            left_s = None if until is None else until - now
            nodes = row.opened.request.nodes
            found.append(BlockNow(name, nodes, joined, tuple(trainers[name]), left_s))
    return tuple(found)


def _limits(history: History, run: RunState, now: float, going: bool) -> tuple[LimitNow, ...]:
    decides = DecisionSettings.of(run.began)
    if decides is None:
        return ()
    settings, owners = decides.controller, owners_in(run)
    used = used_until(history, run, now if going else None) if settings.budgets else {}
    nodes: dict[str, int] = {}
    for fragment in run.fragments.values():
        if going and fragment.ended is None:
            for key in owners.get(fragment.trainer, ()):
                nodes[key] = nodes.get(key, 0) + len(fragment.nodes)
    shares = settings.min_shares.items()
    return (
        *(LimitNow('budget', k, limit, used.get(k, 0.0)) for k, limit in settings.budgets.items()),
        *(LimitNow('minimum share', k, least, nodes.get(k, 0)) for k, least in shares),
    )


def limit_in_words(limit: LimitNow) -> str:
    whose = 'all trainers' if limit.whose == EVERYBODY else limit.whose
    if limit.kind == 'budget':
        spent = ', spent' if limit.used >= limit.limit else ''
        return f'budget of {whose}: {limit.used:,.0f} of {limit.limit:,.0f} node-seconds{spent}'
    return f'minimum share of {whose}: {limit.limit:.0f} nodes, has {limit.used:.0f}'
