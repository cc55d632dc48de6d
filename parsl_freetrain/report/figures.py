"""All figures of a report, from the state of runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, astuple, dataclass
from statistics import median_high
from typing import Any

from parsl_freetrain.core.allocation.problem import Allocator
from parsl_freetrain.core.model.state import History
from parsl_freetrain.report import learned
from parsl_freetrain.report.metrics import Curves, Losses, losses, metric_curves
from parsl_freetrain.report.outcome import DecisionOutcome, outcomes
from parsl_freetrain.report.status import RunStatus, snapshot, state_of
from parsl_freetrain.report.summary import RunEfficiency, efficiency, summary
from parsl_freetrain.report.timeline import Cause, Clock, causes


@dataclass(frozen=True)
class Decisions:
    count: int
    by_status: dict[str, int]
    median_s: float
    longest_s: float


@dataclass(frozen=True)
class Figures:
    title: str  #: the run's name, or the number of runs
    trainers: str  #: the first ones' names
    history: History
    clock: Clock
    now: float
    summary: dict[str, Any]  #: from :func:`parsl_freetrain.report.summary.summary`
    efficiency: RunEfficiency  #: U, from :func:`parsl_freetrain.report.summary.efficiency`
    #: causes, scalings, rescales, losses, metrics, shapes: see the modules of these names.
    causes: tuple[Cause, ...]
    decisions: Decisions
    losses: dict[str, Losses]
    metrics: Curves
    scalings: dict[str, list[learned.MeasuredScaling]]
    rescales: list[learned.RescaleCost]
    #: Outcomes of decisions that changed a trainer's node count.
    outcomes: tuple[DecisionOutcome, ...]
    shapes: list[learned.ShapeTried]
    #: (trainer, fragment, error) of failed fragments, newest first.
    errors: tuple[tuple[str, int, str], ...]
    status: RunStatus  #: the newest of the runs at this time
    states: dict[str, str]  #: by trainer; 'interrupted' if its run is over but the trainer is not


def figures(history: History, now: float, allocator: Allocator | None) -> Figures:
    """The contents of the report on some runs; U needs an exact allocator (None: without U)."""
    clock = Clock(history, now)
    name = history.runs[-1].name
    trainers = list(dict.fromkeys(name for run in history.runs for name in run.trainers))
    decided = [one for run in history.runs for one in run.decisions]
    took = [one.seconds for one in decided]
    failed = [f.ended for f in history.fragments if f.ended and f.ended.ending == 'failed']
    return Figures(
        title=f'run {name}'
        if len(history.runs) == 1
        else f'{len(history.runs)} runs, one continuing the other',
        trainers=', '.join([*trainers[:3], *['…'][: len(trainers) > 3]]) or 'no trainer',
        history=history,
        clock=clock,
        now=now,
        summary=summary(history, now),
        efficiency=efficiency(history, now, allocator) if allocator else RunEfficiency({}, None),
        causes=causes(history, now),
        decisions=Decisions(
            len(decided),
            dict(Counter(one.status for one in decided)),
            median_high(took) if took else 0.0,
            max(took, default=0.0),
        ),
        losses=losses(history, clock),
        metrics=metric_curves(history, clock),
        scalings=learned.scalings(history),
        rescales=learned.rescale_costs(history),
        outcomes=tuple(outcomes(history, now)),
        shapes=learned.shapes_tried(history.fragments),
        errors=tuple((e.trainer, e.fragment, e.error) for e in reversed(failed) if e.error),
        status=snapshot(history, now, named=name),
        states={
            t.name: state_of(t, history.alive(run))
            for run in history.runs
            for t in run.trainers.values()
        },
    )


def as_document(found: Figures) -> dict[str, Any]:
    begun = {r.id: r.began.at for r in found.history.runs}
    names = {r.id: r.name for r in found.history.runs}
    return {
        'runs': list(names.values()),
        'summary': found.summary,
        'efficiency': found.efficiency.by_trainer,
        'efficiency_of_run': found.efficiency.of_run,
        'node_s': [asdict(cause) for cause in found.causes],
        'decisions': asdict(found.decisions),
        'scaling': [asdict(one) for scaling in found.scalings.values() for one in scaling],
        'metrics': {
            metric: {name: [astuple(point) for point in curve] for name, curve in of.items()}
            for metric, of in found.metrics.items()
        },
        'shapes': [asdict(tried) for tried in found.shapes],
        'rescale': [asdict(cost) for cost in found.rescales],
        'outcomes': [
            {
                **asdict(o),
                'run': names[o.run],
                'at': o.at - begun[o.run],
                'until': o.until - begun[o.run],
            }
            for o in found.outcomes
        ],
    }
