"""What a run came to, computed from its state alone."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from parsl_freetrain.core.allocation.objectives import Candidate, speedup
from parsl_freetrain.core.allocation.problem import Allocator, Answer, Bid, Problem
from parsl_freetrain.core.model.state import FINAL_STATES, Fragment, History, RunState, Training
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.report import timeline as tl

EVENNESS = 1e-3  # how far an even division of the constant pool may be off the best, relatively


def summary(history: History, now: float | None = None) -> dict[str, Any]:
    """The closing summary of some runs. ``now``: as in :func:`~.timeline.causes`. ``trainers``: by
    name their counts, with ``samples`` (the last checkpoint's), ``samples_expected`` (or None),
    ``samples_repeated`` (trained, not kept); ``blocks_killed``: taken while training.
    """
    killed = [{node.block for node in tl.struck_nodes(run)} for run in history.runs]
    return {
        'trainers': _trainers(history),
        'blocks': sum(len(run.blocks) for run in history.runs),
        'blocks_killed': sum(map(len, killed)),
        'node_s': tl.node_seconds_of(history, now),
        'wall_s': sum(history.until(r, now) - r.began.at for r in history.runs),
    }


def _trainers(history: History) -> dict[str, dict[str, Any]]:
    living = {r.id for r in history.runs if history.alive(r)}
    fragments: dict[str, list[Fragment]] = defaultdict(list)
    table: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # by training and replica
    for one in history.trainings:  # in order of runs: what a later run says counts
        mine = fragments[one.name]
        mine += one.fragments
        endings = [tl.ending_of(f, f.run in living) for f in mine]
        table[one.trainer.training or one.name][one.name] = {
            'fragments': len(mine),
            'fragments_started': sum(f.started_at is not None for f in mine),
            'preempted': endings.count('preempted'),
            'failed': endings.count('failed'),
            'rescaled': sum(len(a.nodes) != len(b.nodes) for a, b in pairwise(mine)),
            'resumes': one.resumes,
            'verified': one.verified,
            'checkpoints': sum(len(f.checkpoints) for f in mine),
            'samples': one.samples,
            'samples_expected': one.trainer.total_samples,
            'samples_repeated': _repeated(mine, living),
            'state': one.state,
            'why': one.why,
            **({'pieces': one.rounds} if one.trainer.round_samples else {}),
        }
    return {name: _of_all(list(replicas.values())) for name, replicas in table.items()}


def _of_all(replicas: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a training: the first replica's with the counts of all, each with its share."""
    first = dict(replicas[0])
    for key in first.keys() - {'samples_expected', 'state', 'why'}:
        share = len(replicas) if key in ('samples', 'samples_repeated') else 1
        first[key] = sum(row.get(key, 0) for row in replicas) // share
    if 'pieces' in first:
        first['rounds'] = min(row.get('pieces', 0) for row in replicas)
    return first


def _repeated(fragments: list[Fragment], living: set[int]) -> int:
    repeated = 0
    before: int | None = None
    for fragment in fragments:
        kept = fragment.samples
        if kept is None:
            kept = max((c.samples for c in fragment.checkpoints), default=fragment.launched.samples)
        reached = kept
        if fragment.reached is not None:
            reached = fragment.reached
        elif fragment.run not in living and fragment.seen is not None:
            reached = fragment.seen.samples
        repeated += max(0, reached - kept)
        # A checkpoint that could not be used, or was not asked for, sets a trainer back further.
        began = fragment.launched.samples
        if fragment.started_samples is not None:
            began = fragment.started_samples
        repeated += max(0, (began if before is None else before) - began)
        before = kept
    return repeated


class CachedAllocator:
    """Asks the given allocator only about problems that it has not seen."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._answers: dict[Problem, Answer] = {}

    def allocate(self, problem: Problem) -> Answer:
        if problem not in self._answers:
            self._answers[problem] = self._allocator.allocate(problem)
        return self._answers[problem]


@dataclass(frozen=True)
class RunEfficiency:
    by_trainer: dict[str, float | None]
    of_run: float | None


def efficiency(history: History, now: float, allocator: Allocator) -> RunEfficiency:
    r"""Efficiency U so far, by trainer and of the whole run: what node-seconds were worth against
    a constant pool of as many.

    .. math:: U = \frac{\sum_f c(n_f)\, t_f}{\sum_s c(a_s)\, l_s}

    Above: over the trainer's fragments f, the scaling curve c, relative to one node, at the
    fragment's node count times the seconds it trained (no start, no checkpoint, nothing that was
    lost). Below: over the spans s between the trainer's submission and its end (or ``now``) in
    which the same trainers were active, the curve at the nodes :math:`a_s` that the allocator gives
    the trainer in a constant pool, times the span's seconds. It maximises the sum of the trainers'
    relative speeds, and divides evenly where that is as good. The pool has, in nodes, the mean of
    what was offered from the run's start until ``now``; between two whole numbers, the rates are
    interpolated. Trainers with equal curves and limits share equally. Where none was stated
    it is linear in nodes. Runs of a resumed workflow add up above and below.

    U can exceed 1 for a trainer that got more than its share of the constant pool. U of the whole
    run has the sums over its trainers above and below. It is None where the constant pool would
    have given a trainer nothing. Trainings of one epoch or less have none and do not count: their
    first start would be most of the figure. ``now``: epoch seconds. ``allocator``: an exact one;
    wrap it in :class:`CachedAllocator` when this is called over and over.
    """
    above: dict[str, float] = {t.name: 0.0 for t in history.trainings}
    below: dict[str, float] = {t.name: 0.0 for t in history.trainings}
    for one in history.runs:
        _add_efficiency(history, one, history.until(one, now), allocator, above, below)
    short = {t.name for t in history.trainings if (t.submitted.total_epochs or math.inf) <= 1}
    counted = {name for name in above if below[name] > 0 and name not in short}
    worth, against = (sum(part[name] for name in counted) for part in (above, below))
    gains = {name: above[name] / below[name] if name in counted else None for name in above}
    return RunEfficiency(gains, worth / against if counted else None)


def _add_efficiency(
    history: History,
    run: RunState,
    until: float,
    allocator: Allocator,
    above: dict[str, float],
    below: dict[str, float],
) -> None:
    if until <= run.began.at:
        return
    nodes = sum(map(tl.length, tl.offered(run, until).values())) / (until - run.began.at)
    fewer, more = math.floor(nodes), math.ceil(nodes)
    pools = {fewer: 1.0} if fewer == more else {fewer: more - nodes, more: nodes - fewer}
    trainers = list(run.trainers.values())
    curves = {t.name: _speedup(t.trainer, more) for t in trainers}
    parts_of = tl.phases_of(history, run, until)
    for fragment in run.fragments.values():
        if fragment.trainer in curves:
            rate = curves[fragment.trainer].rate_at(len(fragment.nodes))
            above[fragment.trainer] += rate * tl.length(parts_of[fragment.key]['trained'])
    spans = {
        t.name: (t.submitted.at, min(until, t.state_at) if t.state in FINAL_STATES else until)
        for t in trainers
    }
    for start, end in pairwise(sorted({moment for span in spans.values() for moment in span})):
        active = [t for t in trainers if spans[t.name][0] <= start and end <= spans[t.name][1]]
        for pool, share in pools.items() if active else ():
            for name, rate in _constant_rates(active, curves, pool, allocator).items():
                below[name] += share * rate * (end - start)


def _constant_rates(
    trainers: Sequence[Training],
    curves: Mapping[str, ScalingCurve],
    pool: int,
    allocator: Allocator,
) -> dict[str, float]:
    if pool < 1:
        return {}
    bids = [_bid(t.trainer, curves[t.name], pool) for t in trainers]
    given = allocator.allocate(Problem(1.0, pool, tuple(bids))).allocation
    alike: dict[Bid, list[int]] = defaultdict(list)
    for bid in bids:
        alike[replace(bid, name='')].append(given.get(bid.name, 0))
    # It is open which of several equal trainers gets an odd node: they take turns.
    equal = {bid.name: alike[replace(bid, name='')] for bid in bids}
    return {name: fmean(map(curves[name].rate_at, counts)) for name, counts in equal.items()}


def _bid(trainer: Trainer, curve: ScalingCurve, pool: int) -> Bid:
    # Straight curves leave the division open (any is as good): a slight bend makes it even.
    counts = range(min(trainer.max_nodes, pool) + 1)
    worth = tuple(curve.rate_at(n) * (1.0 - EVENNESS * n / pool) for n in counts)
    bent = ScalingCurve(tuple(counts), worth)
    return Bid(trainer.name, trainer.min_nodes, trainer.max_nodes, 0, 0.0, 0.0, bent)


def _speedup(trainer: Trainer, pool: int) -> ScalingCurve:
    curve = trainer.curve
    if curve is None:  # linear up to any count that can occur
        most = max(pool, trainer.max_nodes) * 1000
        curve = ScalingCurve((0, most), (0.0, float(most)))
    return speedup(Candidate(trainer.name, curve, trainer.min_nodes, trainer.max_nodes))
