"""All figures of a report, from a ledger."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Any

from parsl_freetrain.core.allocation.answer import Allocator
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.ledger.clock import Clock
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FINAL_STATES, RunHistory
from parsl_freetrain.ledger.summary import Efficiency, efficiency, summary
from parsl_freetrain.report.causes import Cause, causes
from parsl_freetrain.report.costs import MEASURED
from parsl_freetrain.report.learned import RescaleCost, Scaling, rescale_costs, scalings
from parsl_freetrain.report.losses import Loss, losses
from parsl_freetrain.report.metrics import Curves, metric_curves
from parsl_freetrain.report.outcome import DecisionOutcome, outcomes
from parsl_freetrain.report.shape_speeds import USED, ShapeTried, shapes_tried
from parsl_freetrain.report.status import RunStatus, snapshot


@dataclass(frozen=True)
class Decisions:
    """Number of decisions, the same by solver status, and the median and maximum duration in
    seconds.
    """

    count: int
    by_status: dict[str, int]
    median_s: float
    longest_s: float


@dataclass(frozen=True)
class Figures:
    """The contents of a report.

    Attributes
    ----------
    title
        The run's name, or the number of runs.
    summary
        From :func:`parsl_freetrain.ledger.summary.summary`.
    efficiency
        U, from :func:`parsl_freetrain.ledger.summary.efficiency`.
    causes, scalings, rescales, losses, metrics, shapes
        See the modules of these names.
    outcomes
        Outcomes of decisions that changed a trainer's node count.
    errors
        (trainer, fragment, error) of failed fragments, newest first.
    status
        The newest of the runs at this time.
    """

    title: str
    history: RunHistory
    clock: Clock
    now: float
    summary: dict[str, Any]
    efficiency: Efficiency
    causes: tuple[Cause, ...]
    decisions: Decisions
    losses: dict[str, Loss]
    metrics: Curves
    scalings: dict[str, list[Scaling]]
    rescales: list[RescaleCost]
    outcomes: tuple[DecisionOutcome, ...]
    shapes: list[ShapeTried]
    errors: tuple[tuple[str, int, str], ...]
    status: RunStatus


def figures(reader: Reader, run: str | None, now: float, allocator: Allocator | None) -> Figures:
    """The contents of the report on one run (by its full name) or on all runs of the ledger.

    Parameters
    ----------
    now
        Epoch seconds.
    allocator
        An exact allocator, for the efficiency U; without it there is none.

    Raises
    ------
    BadInput
        The ledger has no run, or none of this name.
    """
    history = reader.history(run)
    if not history.runs:
        raise BadInput(f'The ledger {reader.path} has no run yet.')
    progress, decisions, measured = (
        reader.progress(run),
        reader.decisions(run),
        reader.events(run, MEASURED),
    )
    clock = Clock(history, now)
    return Figures(
        title=f'run {history.runs[0].name}'
        if len(history.runs) == 1
        else f'{len(history.runs)} runs, one continuing the other',
        history=history,
        clock=clock,
        now=now,
        summary=summary(reader, run=run, now=now),
        efficiency=Efficiency({}, None)
        if allocator is None
        else efficiency(reader, now, allocator, run=run),
        causes=causes(history, now),
        decisions=_decisions(decisions),
        losses=losses(history, progress, clock),
        metrics=metric_curves(history, progress, clock),
        scalings=scalings(history, progress),
        rescales=rescale_costs(
            history, (event for event in measured if event['kind'] == 'Rescaled')
        ),
        outcomes=tuple(outcomes(history, progress, measured, decisions, now)),
        shapes=shapes_tried(history, reader.events(run, [USED]), progress, measured),
        errors=tuple(
            (f.trainer, f.fragment, f.error)
            for f in reversed(history.fragments)
            if f.error and f.ending == 'failed'
        ),
        status=snapshot(reader, now, named=history.runs[-1].name),
    )


def state_of(found: Figures, trainer: str) -> str:
    """A trainer's state; 'interrupted' if its run is over but the trainer is not."""
    row = next(t for t in reversed(found.history.trainers) if t.name == trainer)
    run = next(r for r in found.history.runs if r.id == row.run)
    return row.state if row.state in FINAL_STATES or found.history.alive(run) else 'interrupted'


def as_document(found: Figures) -> dict[str, Any]:
    """The document of ``freetrain report --json``. Times of outcomes are seconds since the start of
    their run.
    """
    begun = {r.id: r.begun_at for r in found.history.runs}
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


def _decisions(rows: list[dict[str, Any]]) -> Decisions:
    took = sorted(float(row['seconds']) for row in rows)
    by_status: dict[str, int] = {}
    for row in rows:
        by_status[row['status']] = by_status.get(row['status'], 0) + 1
    return Decisions(
        len(rows), by_status, took[len(took) // 2] if took else 0.0, took[-1] if took else 0.0
    )
