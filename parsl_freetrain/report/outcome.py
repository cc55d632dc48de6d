"""What decisions were expected to train, and what was trained: expectations from the scaling curves as they were known then.

A decision about a trainer stands until the next one that gives it another number of nodes, or until it or its run is over. For that time

* it was expected to train ``curve(nodes) x seconds - rescale_s x curve(nodes before)`` samples: what the allocation maximises, over the
  time that really followed in place of the horizon;
* changing nothing would have been expected to train ``curve(nodes before) x seconds``;
* it trained what its fragments reported, as far as it was kept: what a preemption or a failure took is not counted.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.ledger.rows import FINAL_STATES, FragmentRow, ProgressRow, Run, Story, TrainerRow
from parsl_freetrain.report.speed import Speed

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Outcome:
    """What became of one decision about one trainer, in samples.

    Attributes
    ----------
    at, until
        How long it stood, in epoch seconds.
    nodes_before, nodes
        The trainer's, in the decision before and in this one.
    expected, staying
        What it, or changing nothing, was expected to train in this time; None where no speed of the trainer was known yet.
    trained
        What was trained in this time and kept.
    """

    trainer: str
    run: int
    at: float
    until: float
    nodes_before: int
    nodes: int
    expected: float | None
    staying: float | None
    trained: float

    @property
    def changed(self) -> bool:
        """Whether the decision gave it another number of nodes."""
        return self.nodes != self.nodes_before


def outcomes(story: Story, progress: Iterable[ProgressRow], decisions: Iterable[Mapping[str, Any]], now: float | None = None,
             only: str | None = None) -> Iterator[Outcome]:
    """What became of every decision about every trainer, or only one trainer, in order of trainers and time.

    Parameters
    ----------
    progress, decisions
        All of the story's runs, in order of time.
    now
        Up to when a run that is alive is told, in epoch seconds; by default the last time it noted anything.
    """
    reports: dict[tuple[int, str], list[ProgressRow]] = defaultdict(list)
    for report in progress:
        reports[report.run, report.trainer].append(report)
    decided: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for decision in decisions:
        for name in decision['allocation']:
            if only in (None, name):
                decided[decision['run'], name].append(decision)
    fragments: dict[tuple[int, str], list[FragmentRow]] = defaultdict(list)
    for fragment in story.fragments:
        fragments[fragment.run, fragment.trainer].append(fragment)
    runs = {run.id: run for run in story.runs}
    for row in story.trainers:
        key = row.run, row.name
        if key in decided:
            yield from _of_trainer(row, runs[row.run], story.until(runs[row.run], now), decided[key], reports[key], fragments[key])


def _of_trainer(row: TrainerRow, run: Run, until: float, decided: Sequence[Mapping[str, Any]], reports: Sequence[ProgressRow],
                fragments: Sequence[FragmentRow]) -> Iterator[Outcome]:
    end = min(until, row.state_at) if row.state in FINAL_STATES else until
    by_number: dict[int, list[ProgressRow]] = defaultdict(list)
    for report in reports:
        by_number[report.fragment].append(report)
    trained = _Trained(_kept(fragment, by_number[fragment.fragment], until) for fragment in fragments)
    width = {fragment.fragment: len(fragment.nodes) for fragment in fragments}
    speed = Speed(row.spec)
    counts = [int(d['allocation'][row.name]) for d in decided]
    before = [int(decided[0]['current'].get(row.name, 0)), *counts[:-1]]
    over = [end] * len(decided)
    for i in range(len(decided) - 2, -1, -1):
        over[i] = min(end, decided[i + 1]['at']) if counts[i + 1] != counts[i] else over[i + 1]
    seen = 0
    for decision, was, count, last in zip(decided, before, counts, over, strict=True):
        while seen < len(reports) and reports[seen].at <= decision['at']:
            speed.observe(width.get(reports[seen].fragment, 0), reports[seen].rate)
            seen += 1
        at = float(decision['at'])
        seconds = max(0.0, last - at)
        expected, staying = _expected(row, speed, was, count, seconds)
        yield Outcome(row.name, run.id, at, at + seconds, was, count, expected, staying, trained.until(at + seconds) - trained.until(at))


def _expected(row: TrainerRow, speed: Speed, before: int, count: int, seconds: float) -> tuple[float | None, float | None]:
    curve = speed.curve(max(before, count))
    if curve is None:
        return None, None
    was, new = curve.rate_at(before), curve.rate_at(count)
    cost_s = float(row.spec.get('rescale_up_s' if count > before else 'rescale_down_s') or 0.0) if count != before else 0.0
    return max(0.0, new * seconds - cost_s * was), was * seconds


def _kept(fragment: FragmentRow, reports: Sequence[ProgressRow], until: float) -> Points:
    """Samples against time, as far as a checkpoint has them or may still get them."""
    points: Points = [(fragment.started_at or fragment.decided_at, float(fragment.from_samples))]
    points += [(r.at, float(r.samples)) for r in reports]
    if fragment.ended_at is not None and fragment.reached is not None:
        points.append((fragment.ended_at, float(fragment.reached)))
    most = math.inf if fragment.samples is None else fragment.samples
    return [(min(at, until), min(samples, most)) for at, samples in points]


class _Trained:
    """What a trainer's fragments, one after the other, have trained in all: linear between their reports."""

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
        """Samples until then."""
        i = bisect_right(self._times, at)
        if i == 0 or i == len(self._times):
            return self._samples[max(0, i - 1)] if self._samples else 0.0
        before, after = self._times[i - 1], self._times[i]
        return self._samples[i - 1] + (self._samples[i] - self._samples[i - 1]) * (at - before) / (after - before)
