"""Measurements of a run's trainers: speed by node count, and rescale costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from parsl_freetrain.ledger.rows import (
    CheckpointRow,
    FragmentRow,
    ProgressRow,
    RunHistory,
    TrainerRow,
)
from parsl_freetrain.ledger.timeline import by_fragment
from parsl_freetrain.report.speed import Speed, places_of, speeds

MOST_POINTS = 64
"""Maximum number of points of a curve."""


@dataclass(frozen=True)
class Scaling:
    """A trainer's speed on one node class.

    Attributes
    ----------
    node_class
        Empty where nodes are not told apart.
    stated
        Whether the user stated the curve's shape; otherwise it was measured.
    curve
        (nodes, samples per second), from measurements; empty without any.
    measured
        (nodes, samples per second, fragments): the typical speed of the fragments with this node
        count, which the curve goes by too, and their number.
    """

    trainer: str
    node_class: str
    stated: bool
    curve: tuple[tuple[int, float], ...]
    measured: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True)
class RescaleCost:
    """Costs of changes of a trainer's node count, in seconds.

    Attributes
    ----------
    change
        'up', 'down', or 'start': from no nodes at all.
    assumed_s
        The cost that decisions assume before the first measurement, and also afterwards if the user
        stated it.
    measured_s
        One for each change: from the last step before it to the first step after it, as the ranks
        report. Without such a report: the time of the last checkpoint before the change plus the
        time from the decision to the first step.
    """

    trainer: str
    change: str
    assumed_s: float
    measured_s: tuple[float, ...]


def scalings(history: RunHistory, progress: Sequence[ProgressRow]) -> dict[str, list[Scaling]]:
    """By trainer, for each class on which it was measured; all runs of a resumed workflow count."""
    places = places_of(history)
    known = speeds(history, progress)
    told = {report.key for report in progress if report.rate}
    fragments = Counter((key[1], *places[key]) for key in told if key in places)
    return {
        name: [
            Scaling(
                name,
                node_class,
                known[name].stated is not None,
                _points(known[name], row, node_class),
                tuple(
                    (n, rate, fragments[name, n, node_class]) for n, rate in sorted(rates.items())
                ),
            )
            for node_class, rates in (known[name].measured or {'': {}}).items()
        ]
        for name, row in {row.name: row for row in history.trainers}.items()
    }


def _points(speed: Speed, row: TrainerRow, node_class: str) -> tuple[tuple[int, float], ...]:
    curve = speed.curve(node_class=node_class)
    if curve is None:
        return ()
    fewest = int(row.spec.get('min_nodes') or 1)
    most = max(fewest, int(row.spec.get('max_nodes') or fewest))
    step = -(-(most - fewest + 1) // MOST_POINTS)
    return tuple((n, curve.rate_at(n)) for n in sorted({*range(fewest, most + 1, step), most}))


def rescale_costs(
    history: RunHistory, rescaled: Iterable[Mapping[str, Any]] = ()
) -> list[RescaleCost]:
    """By trainer and change, between fragments of one run. ``rescaled``: the ledger's ``Rescaled``
    events, which the ranks report.
    """
    written = by_fragment(history.checkpoints)
    reported = {
        (e['run'], e['trainer'], e['fragment']): float(e['detail']['seconds']) for e in rescaled
    }
    fragments: dict[tuple[int, str], list[FragmentRow]] = defaultdict(list)
    for fragment in history.fragments:
        fragments[fragment.run, fragment.trainer].append(fragment)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (_, name), mine in fragments.items():
        _add(found, name, mine, written, reported)
    specs = {t.name: t.spec for t in history.trainers}
    return [
        RescaleCost(
            name,
            change,
            float(specs[name].get(f'rescale_{change}_s') or 0.0),
            tuple(found[name, change]),
        )
        for name in specs
        for change in ('up', 'down', 'start')
        if found.get((name, change))
    ]


def _add(
    found: dict[tuple[str, str], list[float]],
    name: str,
    fragments: Sequence[FragmentRow],
    written: Mapping[tuple[int, str, int], Sequence[CheckpointRow]],
    reported: Mapping[tuple[int, str, int], float],
) -> None:
    if fragments and fragments[0].started_at is not None:
        found[name, 'start'].append(fragments[0].started_at - fragments[0].decided_at)
    for before, after in pairwise(fragments):
        if after.started_at is None:
            continue
        seconds = after.started_at - after.decided_at
        if before.ending != 'stopped':
            found[name, 'start'].append(seconds)  # nodes were lost, so there was no handover
        elif len(after.nodes) != len(before.nodes):
            saved = written.get(before.key, ())
            told = reported.get(after.key, seconds + (saved[-1].seconds if saved else 0.0))
            found[name, 'up' if len(after.nodes) > len(before.nodes) else 'down'].append(told)
