"""Compares the samples that decisions were expected to train with those that were trained.
Expectations use the scaling curves known at the time.

A decision about a trainer is valid until the next one that changes its node count, or that gives it
nodes again after a loss, or until the trainer or its run ends. For this time

* it was expected to train ``curve(nodes) x seconds - rescale_s x curve(nodes held)`` samples: what
  the allocation maximises, over the time that really followed in place of the horizon, with the
  rescale cost that was assumed then;
* changing nothing would have been expected to train ``curve(nodes before) x seconds``;
* it trained what its fragments reported, as far as it was kept: what a preemption or a failure took
  is not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.core.model.events import StartFragment, StopFragment
from parsl_freetrain.ledger.rows import (
    FINAL_STATES,
    FragmentRow,
    ProgressRow,
    RunHistory,
    RunRow,
    TrainerRow,
)
from parsl_freetrain.report.costs import Costs
from parsl_freetrain.report.speed import Place, Speed, places_of

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class DecisionOutcome:
    """The outcome of one decision about one trainer, in samples.

    Attributes
    ----------
    decision
        Its ``id`` in the ledger.
    at, until
        When it was valid, in epoch seconds.
    nodes_before, nodes
        The trainer's nodes before and after. Nodes on which it was about to start count.
    expected, staying
        Samples expected in this time from the decision, and from changing nothing; None if the
        trainer's speed on these node classes was not known yet.
    trained
        Samples trained in this time and kept.
    """

    trainer: str
    run: int
    decision: int
    at: float
    until: float
    nodes_before: int
    nodes: int
    expected: float | None
    staying: float | None
    trained: float


def outcomes(
    history: RunHistory,
    progress: Iterable[ProgressRow],
    measured: Iterable[Mapping[str, Any]],
    decisions: Iterable[Mapping[str, Any]],
    now: float | None = None,
    only: str | None = None,
    ids: Collection[int] | None = None,
) -> Iterator[DecisionOutcome]:
    """The outcomes of decisions about all trainers or one trainer, in order of trainers and time.

    Parameters
    ----------
    progress, measured
        Reports and events of all runs, in order of time. ``measured`` has events of the kinds
        :data:`parsl_freetrain.report.costs.MEASURED`.
    decisions
        In order of time, without a gap up to the last.
    now
        End of the account of a live run, in epoch seconds; default: its last entry in the ledger.
    ids
        Identifiers of the decisions; None: all that changed a trainer's node count.
    """
    reports: dict[tuple[int, str], list[ProgressRow]] = defaultdict(list)
    for report in progress:
        reports[report.run, report.trainer].append(report)
    events: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in measured:
        events[event['run'], event['trainer']].append(event)
    decided: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for decision in decisions:
        for name in decision['allocation']:
            if only in (None, name):
                decided[decision['run'], name].append(decision)
    fragments: dict[tuple[int, str], list[FragmentRow]] = defaultdict(list)
    for fragment in history.fragments:
        fragments[fragment.run, fragment.trainer].append(fragment)
    runs = {run.id: run for run in history.runs}
    places = places_of(history)
    for row in history.trainers:
        key = row.run, row.name
        if key in decided:
            yield from _of_trainer(
                row,
                runs[row.run],
                history.until(runs[row.run], now),
                decided[key],
                reports[key],
                events[key],
                fragments[key],
                places,
                ids,
            )


def _of_trainer(
    row: TrainerRow,
    run: RunRow,
    until: float,
    decided: Sequence[Mapping[str, Any]],
    reports: Sequence[ProgressRow],
    events: Sequence[Mapping[str, Any]],
    fragments: Sequence[FragmentRow],
    places: Mapping[tuple[int, str, int], Place],
    ids: Collection[int] | None,
) -> Iterator[DecisionOutcome]:
    end = min(until, row.state_at) if row.state in FINAL_STATES else until
    by_number: dict[int, list[ProgressRow]] = defaultdict(list)
    for report in reports:
        by_number[report.fragment].append(report)
    trained = _Trained(
        _kept(fragment, by_number[fragment.fragment], until) for fragment in fragments
    )
    launched = [fragment.decided_at for fragment in fragments]

    def class_until(at: float) -> str:
        """The node class of the last fragment that was launched before."""
        i = bisect_left(launched, at)
        return places[fragments[i - 1].key][1] if i else ''

    speed, costs = Speed(row.spec), Costs(row.spec)
    counts = [int(d['allocation'][row.name]) for d in decided]
    before = _before(row.name, decided, fragments)
    over = [end] * len(decided)
    for i in range(len(decided) - 2, -1, -1):
        replaced = not counts[i] == before[i + 1] == counts[i + 1]
        over[i] = min(end, decided[i + 1]['at']) if replaced else over[i + 1]
    seen = heard = 0
    for decision, was, count, last in zip(decided, before, counts, over, strict=True):
        if was == count if ids is None else decision['id'] not in ids:
            continue
        at = float(decision['at'])
        while seen < len(reports) and reports[seen].at <= at:
            key = run.id, row.name, reports[seen].fragment
            speed.observe(places.get(key, (0, '')), reports[seen].rate)
            seen += 1
        while heard < len(events) and events[heard]['at'] <= at:
            costs.observe(events[heard])
            heard += 1
        seconds = max(0.0, last - at)
        expected = staying = None
        curve = speed.curve(max(was, count), class_until(last))
        old = speed.curve(max(was, count), class_until(at)) if was else curve
        if curve is not None and old is not None:
            held = int(decision['current'].get(row.name, 0))
            expected = max(
                0.0, curve.rate_at(count) * seconds - costs.of(held, count) * old.rate_at(held)
            )
            staying = old.rate_at(was) * seconds
        yield DecisionOutcome(
            row.name,
            run.id,
            decision['id'],
            at,
            at + seconds,
            was,
            count,
            expected,
            staying,
            trained.until(at + seconds) - trained.until(at),
        )


def _before(
    name: str, decided: Sequence[Mapping[str, Any]], fragments: Sequence[FragmentRow]
) -> list[int]:
    """The trainer's nodes at each decision, including nodes on which it was about to start."""
    ending = {fragment.fragment: fragment.ending for fragment in fragments}
    before: list[int] = []
    given, on_its_way = 0, False
    for decision in decided:
        held = int(decision['current'].get(name, 0))
        before.append(held or (given if on_its_way else 0))
        given = int(decision['allocation'][name])
        done = next(
            (
                action
                for action in decision['actions']
                if isinstance(action, StartFragment | StopFragment) and action.trainer == name
            ),
            None,
        )
        # The trainer waits until its own fragment or those of others have stopped.
        on_its_way = (
            not held
            if done is None
            else isinstance(done, StopFragment) and ending.get(done.fragment) in (None, 'stopped')
        )
    return before


def _kept(fragment: FragmentRow, reports: Sequence[ProgressRow], until: float) -> Points:
    """Samples over time, as far as they are or may still be in a checkpoint."""
    points: Points = [(fragment.started_at or fragment.decided_at, float(fragment.from_samples))]
    points += [(r.at, float(r.samples)) for r in reports]
    if fragment.ended_at is not None and fragment.reached is not None:
        points.append((fragment.ended_at, float(fragment.reached)))
    most = math.inf if fragment.samples is None else fragment.samples
    return [(min(at, until), min(samples, most)) for at, samples in points]


class _Trained:
    """The total number of samples that a trainer's fragments have trained, linear between their
    reports.
    """

    def __init__(self, fragments: Iterable[Points]) -> None:
        self._times: list[float] = []
        self._samples: list[float] = []
        total = 0.0
        for points in fragments:
            first = points[0][1]
            for at, samples in points:
                self._times.append(max(at, self._times[-1]) if self._times else at)
                self._samples.append(total + samples - first)
            total = self._samples[-1]

    def until(self, at: float) -> float:
        """Samples trained until ``at``."""
        i = bisect_right(self._times, at)
        if i == 0 or i == len(self._times):
            return self._samples[max(0, i - 1)] if self._samples else 0.0
        before, after = self._times[i - 1], self._times[i]
        return self._samples[i - 1] + (self._samples[i] - self._samples[i - 1]) * (at - before) / (
            after - before
        )
