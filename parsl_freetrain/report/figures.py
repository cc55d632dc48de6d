"""All figures of a report, from a ledger."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from parsl_freetrain.core.allocation import Allocator
from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.ledger.clock import Clock
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import FINAL_STATES, Story
from parsl_freetrain.ledger.summary import efficiency, summary
from parsl_freetrain.report.causes import Cause, causes
from parsl_freetrain.report.costs import MEASURED
from parsl_freetrain.report.learned import RescaleCost, Scaling, rescale_costs, scalings
from parsl_freetrain.report.losses import Loss, losses
from parsl_freetrain.report.outcome import Outcome, outcomes


@dataclass(frozen=True)
class Decisions:
    """How many there were, of which solver's statuses, and how long they took: seconds, the middle one and the longest."""

    count: int
    by_status: dict[str, int]
    median_s: float
    longest_s: float


@dataclass(frozen=True)
class Figures:
    """What a report shows.

    Attributes
    ----------
    title
        The run, or how many runs.
    summary
        As :func:`parsl_freetrain.ledger.summary.summary` has it.
    efficiency
        U by trainer, as :func:`parsl_freetrain.ledger.summary.efficiency` has it.
    causes, scalings, rescales, losses
        See the modules that make them.
    outcomes
        Of the decisions that gave a trainer another number of nodes.
    errors
        (trainer, fragment, error) of fragments that failed, the newest first.
    """

    title: str
    story: Story
    clock: Clock
    now: float
    summary: dict[str, Any]
    efficiency: dict[str, float | None]
    causes: tuple[Cause, ...]
    decisions: Decisions
    losses: dict[str, Loss]
    scalings: dict[str, Scaling]
    rescales: list[RescaleCost]
    outcomes: tuple[Outcome, ...]
    errors: tuple[tuple[str, int, str], ...]


def figures(reader: Reader, run: str | None, now: float, allocator: Allocator) -> Figures:
    """Everything that the report of one run (by its full name), or of all runs of the ledger, shows.

    Parameters
    ----------
    now
        Epoch seconds.
    allocator
        An exact one, for the efficiency U.

    Raises
    ------
    BadInput
        The ledger has no run yet, or none of this name.
    """
    story = reader.story(run)
    if not story.runs:
        raise BadInput(f'The ledger {reader.path} has no run yet.')
    progress, decisions, measured = reader.progress(run), reader.decisions(run), reader.events(run, MEASURED)
    clock = Clock(story, now)
    return Figures(
        title=f'run {story.runs[0].name}' if len(story.runs) == 1 else f'{len(story.runs)} runs, one continuing the other',
        story=story, clock=clock, now=now,
        summary=summary(reader, run=run, now=now),
        efficiency=efficiency(reader, now, allocator, run=run),
        causes=causes(story, now),
        decisions=_decisions(decisions),
        losses=losses(story, progress, clock),
        scalings=scalings(story, progress),
        rescales=rescale_costs(story, (event for event in measured if event['kind'] == 'Rescaled')),
        outcomes=tuple(outcomes(story, progress, measured, decisions, now)),
        errors=tuple((f.trainer, f.fragment, f.error) for f in reversed(story.fragments) if f.error and f.ending == 'failed'),
    )


def state_of(found: Figures, trainer: str) -> str:
    """A trainer's state; 'interrupted' if its run is over and it is not."""
    row = next(t for t in reversed(found.story.trainers) if t.name == trainer)
    run = next(r for r in found.story.runs if r.id == row.run)
    return row.state if row.state in FINAL_STATES or found.story.alive(run) else 'interrupted'


def as_document(found: Figures) -> dict[str, Any]:
    """The figures as JSON has them: what ``freetrain report --json`` prints. Times of outcomes are seconds since their run began."""
    begun = {r.id: r.begun_at for r in found.story.runs}
    names = {r.id: r.name for r in found.story.runs}
    return {
        'runs': list(names.values()),
        'summary': found.summary,
        'efficiency': found.efficiency,
        'node_s': [asdict(cause) for cause in found.causes],
        'decisions': asdict(found.decisions),
        'scaling': [asdict(scaling) for scaling in found.scalings.values()],
        'rescale': [asdict(cost) for cost in found.rescales],
        'outcomes': [{**asdict(o), 'run': names[o.run], 'at': o.at - begun[o.run], 'until': o.until - begun[o.run]}
                     for o in found.outcomes],
    }


def _decisions(rows: list[dict[str, Any]]) -> Decisions:
    took = sorted(float(row['seconds']) for row in rows)
    by_status: dict[str, int] = {}
    for row in rows:
        by_status[row['status']] = by_status.get(row['status'], 0) + 1
    return Decisions(len(rows), by_status, took[len(took) // 2] if took else 0.0, took[-1] if took else 0.0)
