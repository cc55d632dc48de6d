"""What a run has taught about its trainers: speed by node count, and what changing the node count costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from parsl_freetrain.ledger.rows import CheckpointRow, FragmentRow, ProgressRow, Story, TrainerRow
from parsl_freetrain.ledger.timeline import by_fragment
from parsl_freetrain.report.speed import Speed, speeds

MOST_POINTS = 64
"""Points of a curve that are shown."""


@dataclass(frozen=True)
class Scaling:
    """A trainer's speed.

    Attributes
    ----------
    stated
        Whether the user gave the curve's shape; else it was learned.
    curve
        (nodes, samples per second), from what was learned; empty where nothing was.
    measured
        (nodes, samples per second, fragments): the median of what fragments of so many nodes reported last.
    """

    trainer: str
    stated: bool
    curve: tuple[tuple[int, float], ...]
    measured: tuple[tuple[int, float, int], ...]


@dataclass(frozen=True)
class RescaleCost:
    """What changes of a trainer's node count cost, in seconds.

    Attributes
    ----------
    change
        'up', 'down', or 'start': from no nodes at all.
    assumed_s
        What decisions count with before anything has been measured; afterwards too, where the user stated it.
    measured_s
        One for each change: from the last step before it to the first step after it, as the ranks report; where they do not, writing the
        last checkpoint before it, and from the decision to the first step after it.
    """

    trainer: str
    change: str
    assumed_s: float
    measured_s: tuple[float, ...]


def scalings(story: Story, progress: Sequence[ProgressRow]) -> dict[str, Scaling]:
    """By trainer; of a resumed workflow all runs count."""
    width = {f.key: len(f.nodes) for f in story.fragments}
    known = speeds(story, progress)
    last: dict[tuple[int, str, int], float] = {}
    for report in progress:
        key = report.run, report.trainer, report.fragment
        if report.rate is not None and width.get(key):
            last[key] = report.rate
    rates: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, rate in last.items():
        rates[key[1]][width[key]].append(rate)
    return {name: Scaling(name, known[name].stated is not None, _points(known[name], row),
                          tuple((n, median(found), len(found)) for n, found in sorted(rates[name].items())))
            for name, row in {row.name: row for row in story.trainers}.items()}


def _points(speed: Speed, row: TrainerRow) -> tuple[tuple[int, float], ...]:
    curve = speed.curve()
    if curve is None:
        return ()
    fewest = int(row.spec.get('min_nodes') or 1)
    most = max(fewest, int(row.spec.get('max_nodes') or fewest))
    step = -(-(most - fewest + 1) // MOST_POINTS)
    return tuple((n, curve.rate_at(n)) for n in sorted({*range(fewest, most + 1, step), most}))


def rescale_costs(story: Story, rescaled: Iterable[Mapping[str, Any]] = ()) -> list[RescaleCost]:
    """By trainer and change, where there was one; between fragments of one run.

    Parameters
    ----------
    rescaled
        The ledger's events of this kind: what the ranks have reported.
    """
    written = by_fragment(story.checkpoints)
    reported = {(e['run'], e['trainer'], e['fragment']): float(e['detail']['seconds']) for e in rescaled}
    fragments: dict[tuple[int, str], list[FragmentRow]] = defaultdict(list)
    for fragment in story.fragments:
        fragments[fragment.run, fragment.trainer].append(fragment)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (_, name), mine in fragments.items():
        _add(found, name, mine, written, reported)
    specs = {t.name: t.spec for t in story.trainers}
    return [RescaleCost(name, change, float(specs[name].get(f'rescale_{change}_s') or 0.0), tuple(found[name, change]))
            for name in specs for change in ('up', 'down', 'start') if found.get((name, change))]


def _add(found: dict[tuple[str, str], list[float]], name: str, fragments: Sequence[FragmentRow],
         written: Mapping[tuple[int, str, int], Sequence[CheckpointRow]], reported: Mapping[tuple[int, str, int], float]) -> None:
    if fragments and fragments[0].started_at is not None:
        found[name, 'start'].append(fragments[0].started_at - fragments[0].decided_at)
    for before, after in pairwise(fragments):
        if after.started_at is None:
            continue
        seconds = after.started_at - after.decided_at
        if before.ending != 'stopped':
            found[name, 'start'].append(seconds)      # nodes were taken: there was nothing to hand over
        elif len(after.nodes) != len(before.nodes):
            saved = written.get(before.key, ())
            told = reported.get(after.key, seconds + (saved[-1].seconds if saved else 0.0))
            found[name, 'up' if len(after.nodes) > len(before.nodes) else 'down'].append(told)
