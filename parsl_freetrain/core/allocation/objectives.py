"""Objectives: what each node count is worth to a trainer per second; no nodes are worth 0. The
allocator maximises its sum over all trainers times the horizon, less the cost of rescaling.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from parsl_freetrain.core.model.errors import BadInput, nodes_text
from parsl_freetrain.core.model.expression import Expression, parse
from parsl_freetrain.core.model.types import Efficiency, ScalingCurve

MOST_WORTH = 1e18  # more than this per second is refused: solvers calculate in floats
SPEED_SHARE = 0.01  # what full speed adds under ``deadline``, so that all nodes are used

_FOREVER_S = 1e12  # what takes longer takes this long: sums with infinity have no ratio


@dataclass(frozen=True)
class Running:
    """What a trainer holds, and what giving it up costs, for objectives that charge for it."""

    #: With ``node_class``: what it holds; the class is empty where classes are not told apart.
    nodes: int
    node_class: str
    #: Seconds without training that another number of nodes, or another class, costs.
    restart_s: float
    age_s: float  #: seconds since it was submitted
    lost_s: float  #: seconds of these that restarts have cost

    def stays(self, nodes: int, node_class: str) -> bool:
        """Whether this choice needs no restart."""
        return nodes == self.nodes and node_class in ('', self.node_class)

    def after_restart(self, left_s: float | None) -> float:
        """The share of its speed that a restart leaves; ``left_s``: seconds of the rest (None:
        unknown). (life - lost) / (life + restart) for those that restart often, where life is the
        age and what is left (Sia and Pollux take the age alone); left / (left + restart) for those
        nearly done.
        """
        share, life_s = 1.0, self.age_s + (left_s or 0.0)
        if self.age_s > self.restart_s:
            share = max(life_s - self.lost_s, 0.0) / (life_s + self.restart_s)
        return share if left_s is None else share * left_s / (left_s + self.restart_s or 1.0)


@dataclass(frozen=True)
class Candidate:
    """A trainer as an objective sees it."""

    name: str  #: for error messages
    curve: ScalingCurve  #: samples per second by node count
    #: With ``max_nodes`` (no more than there are): the counts that its worth is asked for.
    min_nodes: int
    max_nodes: int
    priority: float = 1.0  #: how much it counts, relative to 1
    #: Seconds from now until it should be finished; None: no deadline.
    deadline_s: float | None = None
    remaining_samples: float | None = None  #: what is left to train; None: unknown
    efficiency: Efficiency | None = None  #: statistical efficiency; None: 1 at every count
    waited_s: float = 0.0  #: seconds since it had nodes last
    #: With ``fastest``: where ``curve`` is that of one node class: the rate on one node of its
    #: slowest class, which speed-ups are relative to, and its best rate on any class. None: those
    #: of ``curve``.
    slowest: float | None = None
    fastest: float | None = None
    node_class: str = ''  #: that class
    running: Running | None = None  #: what it holds; None: it waits

    @property
    def one_node_rate(self) -> float:
        """Rate on one node; where that is 0, per node at the first point above 0; else 1."""
        if self.slowest is not None:
            return self.slowest
        return self.curve.rate_at(1) or next(
            (r / n for n, r in zip(self.curve.nodes, self.curve.rate, strict=True) if r > 0), 1.0
        )

    @property
    def best_rate(self) -> float:
        """The rate at the fastest count that it may have; 1 if that is 0."""
        if self.fastest is not None:
            return self.fastest
        return max((self.curve.rate_at(n) for n in _counts(self)), default=0.0) or 1.0


Metric = Callable[[Candidate], ScalingCurve]


def by_class(
    metric: Metric, candidate: Candidate, curves: Iterable[tuple[str, ScalingCurve]]
) -> tuple[tuple[str, ScalingCurve], ...]:
    """What node counts of each class are worth, given the scaling curve on each."""
    on_class = {name: replace(candidate, curve=curve, node_class=name) for name, curve in curves}
    slowest = min((one.one_node_rate for one in on_class.values()), default=1.0)
    fastest = max((one.best_rate for one in on_class.values()), default=1.0)
    return tuple(
        (name, metric(replace(one, slowest=slowest, fastest=fastest)))
        for name, one in on_class.items()
    )


def throughput(candidate: Candidate) -> ScalingCurve:
    """Samples per second: what the scaling curve says."""
    return candidate.curve


def speedup(candidate: Candidate) -> ScalingCurve:
    """Speed relative to one node, rate(n) / rate(1): trainers of unlike sample sizes compare."""
    return _scaled(candidate, 1.0)


def priority(candidate: Candidate) -> ScalingCurve:
    """Speed-up weighted by priority: priority x rate(n) / rate(1)."""
    return _scaled(candidate, candidate.priority)


def deadline(candidate: Candidate) -> ScalingCurve:
    """Finish by: priority x (done + 0.01 x rate(n) / best rate). ``done`` is the share of the
    remaining samples that is trained by the deadline at this rate, min(1, rate(n) x deadline_s /
    remaining_samples), 0 without a deadline or behind it. Raises BadInput if there is one and the
    remaining samples are not known.
    """
    left_s = max(candidate.deadline_s or 0.0, 0.0)
    if candidate.deadline_s is not None and not candidate.remaining_samples:
        raise BadInput(
            f'Trainer {candidate.name!r} has a deadline_s but no remaining_samples, '
            'which the objective deadline needs.'
        )
    per_rate = left_s / candidate.remaining_samples if candidate.remaining_samples else 0.0
    best = candidate.best_rate

    def worth(nodes: int) -> float:
        rate = candidate.curve.rate_at(nodes)
        return candidate.priority * (min(1.0, rate * per_rate) + SPEED_SHARE * rate / best)

    return _tabulated(candidate, worth)


def goodput(candidate: Candidate) -> ScalingCurve:
    """Throughput x statistical efficiency (Pollux, OSDI 2021): samples as useful as one node's."""
    efficiency = candidate.efficiency
    if efficiency is None:
        return candidate.curve
    return _tabulated(candidate, lambda n: candidate.curve.rate_at(n) * efficiency.at(n))


def fair_goodput(candidate: Candidate) -> ScalingCurve:
    """Sia's objective (SOSP 2023) for unequal nodes: priority x max(0, 1.1 - 1 / sqrt(s)).
    s is the goodput relative to one node of the slowest class, times :meth:`Running.after_restart`
    where the trainer does not keep what it holds; rescale costs are not charged in addition.
    """
    now, efficiency, samples = candidate.running, candidate.efficiency, candidate.remaining_samples

    def worth(nodes: int) -> float:
        rate = candidate.curve.rate_at(nodes)
        speed = rate * (efficiency.at(nodes) if efficiency else 1.0)
        if speed > 0 and now is not None and not now.stays(nodes, candidate.node_class):
            speed *= now.after_restart(None if samples is None else min(samples / rate, _FOREVER_S))
        if speed <= 0:
            return 0.0
        return candidate.priority * max(0.0, 1.1 - math.sqrt(candidate.one_node_rate / speed))

    return _tabulated(candidate, worth)


METRICS: dict[str, Metric] = {
    f.__name__: f for f in (throughput, speedup, priority, deadline, goodput, fair_goodput)
}

CHARGES_RESTARTS = (fair_goodput,)  # objectives that charge for restarts themselves
FIELDS = {
    'rate': 'samples per second on this number of nodes',
    'rate1': 'samples per second on one node',
    'nodes': 'the node count',
    'min_nodes': 'the fewest nodes that it runs on',
    'priority': '1 if none is given',
    'deadline_s': 'seconds until it should be finished; infinite if no deadline is given',
    'remaining_samples': 'what is left to train; it must be known',
    'efficiency': 'statistical efficiency on this number of nodes; 1 if none is given',
    'waited_s': 'seconds that it has waited; 0 if not given',
}
"""What an expression may ask for, by name."""


CHANGING = ('deadline_s', 'remaining_samples', 'waited_s')  # fields that change as time passes


def objective_named(text: str, what: str = 'objective') -> Metric:
    """By name, or by an expression over :data:`FIELDS`; ``what``: its name in BadInput."""
    if text in METRICS:
        return METRICS[text]
    word = text.strip()
    if not word or (word.isidentifier() and word not in FIELDS):
        raise BadInput(
            f'There is no {what} {text!r} to allocate nodes by; choose one of '
            f'{", ".join(METRICS)}, or write an expression of {", ".join(FIELDS)}.'
        )
    expression = parse(text, FIELDS)
    return lambda candidate: _tabulated(candidate, lambda n: _evaluated(expression, candidate, n))


def follows_time(text: str) -> bool:
    """Whether the objective of that name, or expression (else BadInput), changes with time."""
    if text in METRICS:
        return text in (deadline.__name__, fair_goodput.__name__)
    return not parse(text, FIELDS).uses.isdisjoint(CHANGING)


def _evaluated(expression: Expression, candidate: Candidate, nodes: int) -> float:
    if 'remaining_samples' in expression.uses and candidate.remaining_samples is None:
        raise BadInput(
            f'Trainer {candidate.name!r} has no remaining_samples, which the objective '
            f'{expression.text!r} needs.'
        )
    fields = {
        'rate': candidate.curve.rate_at(nodes),
        'rate1': candidate.one_node_rate,
        'nodes': float(nodes),
        'min_nodes': float(candidate.min_nodes),
        'priority': candidate.priority,
        'deadline_s': math.inf if candidate.deadline_s is None else candidate.deadline_s,
        'remaining_samples': candidate.remaining_samples or 0.0,
        'efficiency': candidate.efficiency.at(nodes) if candidate.efficiency else 1.0,
        'waited_s': candidate.waited_s,
    }
    try:
        return expression.value(fields)
    except (ArithmeticError, ValueError) as error:
        raise BadInput(
            f'Trainer {candidate.name!r}: the objective {expression.text!r} has no value '
            f'at {nodes_text(nodes)} ({error}).'
        ) from None


def _scaled(candidate: Candidate, factor: float) -> ScalingCurve:
    one = candidate.one_node_rate
    curve = candidate.curve
    points = zip(curve.nodes, curve.rate, strict=True)
    worths = tuple(_checked(candidate, n, factor * r / one) for n, r in points)
    return ScalingCurve(curve.nodes, worths)


def _tabulated(candidate: Candidate, worth: Callable[[int], float]) -> ScalingCurve:
    """A curve with a point at every count, since ``worth`` need not be linear in between."""
    points = {n: _checked(candidate, n, worth(n)) for n in _counts(candidate)}
    return ScalingCurve.from_points(points)


def _counts(candidate: Candidate) -> Collection[int]:
    return range(max(candidate.min_nodes, 1), candidate.max_nodes + 1)


def _checked(candidate: Candidate, nodes: int, worth: float) -> float:
    if not 0 <= worth <= MOST_WORTH:
        raise BadInput(
            f'Trainer {candidate.name!r}: the objective is {worth:g} at {nodes_text(nodes)}; '
            f'it must be a number from 0 to {MOST_WORTH:g}.'
        )
    return worth
