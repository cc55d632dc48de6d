"""Compares the samples that decisions were expected to train with those that were trained, by the
scaling curves known at the time. A decision about a trainer is valid until the next one that
changes its node count, or gives it nodes again after a loss, or until its end. It was expected to
train ``curve(nodes) x seconds - rescale_s x curve(nodes held)`` samples, what the allocation
maximises over the time that followed; without a change ``curve(nodes before) x seconds``. It
trained what its fragments reported, as far as it was kept.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parsl_freetrain.core.controller.overheads import Measured
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.state import FINAL_STATES, Fragment, History, RunState, Training
from parsl_freetrain.report.learned import Place, Speed, place_of

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class DecisionOutcome:
    trainer: str
    run: int
    decision: int  #: its number among the decisions of the run, from 1
    at: float  #: at, until: when it was valid, in epoch seconds
    until: float
    #: nodes_before, nodes: the trainer's nodes before and after, with those about to start.
    nodes_before: int
    nodes: int
    #: expected, staying: samples by the decision, and without a change; None: speed not known.
    expected: float | None
    staying: float | None
    trained: float  #: samples trained in this time and kept


def outcomes(
    history: History,
    now: float | None = None,
    only: str | None = None,
    numbers: Collection[int] | None = None,
) -> Iterator[DecisionOutcome]:
    """Of decisions about all trainers or one, until ``now``; ``numbers``: of these only."""
    for run in history.runs:
        until = history.until(run, now)
        for one in run.trainers.values():
            if only in (None, one.name):
                decided = [d for d in enumerate(run.decisions, 1) if one.name in d[1].allocation]
                yield from _of_trainer(run, one, until, decided, numbers)


def _of_trainer(
    run: RunState,
    training: Training,
    until: float,
    decided: Sequence[tuple[int, ev.Decided]],
    numbers: Collection[int] | None,
) -> Iterator[DecisionOutcome]:
    name, known = training.name, _KnownThen(run, training)
    trained = _trained_by(_kept(fragment, until) for fragment in training.fragments)
    counts = [d.allocation[name] for _, d in decided]
    before = _before(name, [d for _, d in decided], training.fragments)
    end = min(until, training.state_at) if training.state in FINAL_STATES else until
    over = [end] * len(decided)
    for i in range(len(decided) - 2, -1, -1):
        replaced = not counts[i] == before[i + 1] == counts[i + 1]
        over[i] = min(end, decided[i + 1][1].at) if replaced else over[i + 1]
    for (number, decision), was, count, last in zip(decided, before, counts, over, strict=True):
        if was == count if numbers is None else number not in numbers:
            continue
        at, seconds = decision.at, max(0.0, last - decision.at)
        known.until(at)
        expected = staying = None
        curve = known.speed.curve(max(was, count), known.class_at(last))
        old = known.speed.curve(max(was, count), known.class_at(at)) if was else curve
        if curve is not None and old is not None:
            held = decision.current.get(name, 0)
            cost = known.cost_s(held, count) * old.rate_at(held)
            expected = max(0.0, curve.rate_at(count) * seconds - cost)
            staying = old.rate_at(was) * seconds
        then = at + seconds
        # Replicas count in samples of all of them, and each trains its share.
        done = (trained(then) - trained(at)) / training.trainer.replicas
        yield DecisionOutcome(name, run.id, number, at, then, was, count, expected, staying, done)


class _KnownThen:
    """What was known of a trainer's speed and costs at a time, which only goes on."""

    def __init__(self, run: RunState, training: Training) -> None:
        self.speed = Speed(training.trainer)
        self._trainer, self._measured = training.trainer, Measured()
        places = {fragment.number: place_of(run, fragment) for fragment in training.fragments}
        self._classes = [places[fragment.number][1] for fragment in training.fragments]
        self._launched = [fragment.launched.at for fragment in training.fragments]
        ended = [f.ended for f in training.fragments if f.ended is not None]
        reports = [(places[f.number], r) for f in training.fragments for r in f.progress]
        others = [((0, ''), event) for event in (*training.rescaled, *ended)]
        facts: list[tuple[Place, ev.Event]] = [*reports, *others]
        self._facts = sorted(facts, key=lambda fact: fact[1].at)
        self._seen = 0

    def until(self, at: float) -> None:
        while self._seen < len(self._facts) and self._facts[self._seen][1].at <= at:
            place, event = self._facts[self._seen]
            if isinstance(event, ev.FragmentProgressed):
                self.speed.observe(place, event.rate)
            elif isinstance(event, ev.Rescaled):
                self._measured.rescaled(up=event.after > event.before, seconds=event.seconds)
            elif isinstance(event, ev.FragmentEnded):
                self._measured.timed(event.start_s, event.step_s, event.checkpoint_s)
            self._seen += 1

    def cost_s(self, before: int, after: int) -> float:
        """The assumed cost of this change, in seconds at the rate before it."""
        up_s, down_s = self._measured.costs(self._trainer)
        return 0.0 if before == after else up_s if after > before else down_s

    def class_at(self, at: float) -> str:
        """The node class of the last fragment that was launched before."""
        i = bisect_left(self._launched, at)
        return self._classes[i - 1] if i else ''


def _before(name: str, decided: Sequence[ev.Decided], fragments: Sequence[Fragment]) -> list[int]:
    """The trainer's nodes at each decision, including nodes on which it was about to start."""
    ending = {fragment.number: fragment.ending for fragment in fragments}
    before: list[int] = []
    given, on_its_way = 0, False
    for decision in decided:
        held = decision.current.get(name, 0)
        before.append(held or (given if on_its_way else 0))
        given = decision.allocation[name]
        kinds = ev.StartFragment | ev.StopFragment
        mine = (one for one in decision.actions if isinstance(one, kinds) and one.trainer == name)
        done = next(mine, None)
        # The trainer waits until its own fragment or those of others have stopped.
        on_its_way = (
            not held
            if done is None
            else isinstance(done, ev.StopFragment)
            and ending.get(done.fragment) in (None, 'stopped')
        )
    return before


def _kept(fragment: Fragment, until: float) -> Points:
    """Samples over time, as far as they are or may still be in a checkpoint."""
    points: Points = [
        (fragment.started_at or fragment.launched.at, float(fragment.launched.samples))
    ]
    points += [(r.at, float(r.samples)) for r in fragment.progress]
    if fragment.ended_at is not None and fragment.reached is not None:
        points.append((fragment.ended_at, float(fragment.reached)))
    most = math.inf if fragment.samples is None else fragment.samples
    return [(min(at, until), min(samples, most)) for at, samples in points]


def _trained_by(fragments: Iterable[Points]) -> Callable[[float], float]:
    """All that fragments have trained up to a time, linear between their reports."""
    times, trained, total = [0.0], [0.0], 0.0
    for points in fragments:
        trained += (total + samples - points[0][1] for _, samples in points)
        times += (at for at, _ in points)
        total = trained[-1]
    ordered, known = np.maximum.accumulate(times), np.array(trained)
    return lambda at: float(np.interp(at, ordered, known))
