"""A trainer's speed by node count and class: stated, learned from its fragments, or transferred."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.core.model.types import ScalingCurve, Trainer

Floats = NDArray[np.float64]

SIGMA = np.concatenate([[0.0], np.logspace(-3.5, 0.0, 15)])
KAPPA = np.concatenate([[0.0], np.logspace(-6.0, -1.5, 13)])
_SIGMA, _KAPPA = (grid.ravel() for grid in np.meshgrid(SIGMA, KAPPA, indexing='ij'))
# Standard deviations of the logarithm of a rate: of one measurement, and of the model itself.
NOISE, MISFIT = 0.1, 0.04
REPORTS = 3  # of the speed, with at least a step between two: then a shape has been tried


def shapes(nodes: Sequence[int]) -> Floats:
    """Logarithms of the speed-ups at these counts, shape (parameters, counts)."""
    n = np.asarray(nodes, dtype=np.float64)
    lost = _SIGMA[:, None] * (n - 1) + _KAPPA[:, None] * n * (n - 1)
    logs: Floats = np.log(n) - np.log1p(lost)
    return logs


class Evidence:
    """One trainer's measurements: by parameters, log ``likelihood`` and ``one_node`` rate."""

    def __init__(self, measured: Iterable[tuple[int, float, int]]) -> None:
        nodes, rates, times = zip(*measured, strict=True)
        weight = 1 / (NOISE**2 / np.array(times) + MISFIT**2)
        rest = np.log(rates) - shapes(nodes)
        self.one_node: Floats = rest @ weight / weight.sum()
        self.likelihood: Floats = -0.5 * (rest - self.one_node[:, None]) ** 2 @ weight


def _prior() -> Floats:
    """Log probability of each pair before a measurement: all magnitudes alike, early falls less."""
    peak = np.sqrt((1 - np.minimum(_SIGMA, 1)) / np.maximum(_KAPPA, 1e-12))
    logs: Floats = -np.log1p(8 / np.maximum(peak, 1.0))
    return logs


PRIOR = _prior()


class Posterior:
    """A trainer's rates: by its ``own`` evidence, its function's, or the assumed one."""

    def __init__(self, own: Evidence | None, related: Sequence[Evidence], one_node: float) -> None:
        # All related trainers together count as one: their networks may differ in details.
        others = sum((e.likelihood for e in related), np.zeros_like(PRIOR))
        logs = PRIOR + others / max(len(related), 1)
        if own is not None:
            logs = logs + own.likelihood
        self._share: Floats = np.exp(logs - logs.max())
        self._share /= self._share.sum()
        if own is not None:
            self._start = own.one_node
        elif related:
            self._start = np.mean([e.one_node for e in related], axis=0)
        else:
            self._start = np.full(len(logs), math.log(one_node))

    def rates(self, counts: Sequence[int]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of the rate at each count."""
        rates = self._start[:, None] + shapes(counts)
        mean: Floats = self._share @ rates
        return mean, np.sqrt(np.maximum(self._share @ (rates - mean) ** 2, 0.0))


def points(max_nodes: int) -> list[int]:
    """Node counts at which a curve is computed: all small ones, then in steps of about a tenth."""
    found = {*range(1, min(max_nodes, 16) + 1), max_nodes}
    n = 16.0
    while n < max_nodes:
        n *= 1.1
        found.add(min(round(n), max_nodes))
    return sorted(found)


OPTIMISM = {1: 3.0, 2: 0.5}
"""By the number of counts measured: standard deviations that others are hoped to be faster."""

CAUTION = 0.5  # the same while there are unknown trainers, for whose hopes none loses nodes

REMEMBERED = 15  # maximum number of measurements of a count that its typical rate is the median of
RELATED = 20  # maximum number of trainers of the same function to learn from

# A rate at a measured count counts as much as the model after this number of measurements.
_HALF_TRUST = 3


@dataclass
class Profile:
    """Rates by node count: ``stated``, or learned, also from ``related`` profiles."""

    stated: ScalingCurve | None
    related: 'list[Profile]' = field(default_factory=list, repr=False, compare=False)
    _rates: dict[int, list[float]] = field(default_factory=dict)
    _curves: dict[tuple[object, ...], ScalingCurve] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def measured(self) -> dict[int, float]:
        """The typical rate at each measured count: the median, so that outliers do no harm."""
        return {nodes: median(rates) for nodes, rates in self._rates.items()}

    @cached_property
    def evidence(self) -> Evidence | None:
        seen = [(n, rate, len(self._rates[n])) for n, rate in self.measured.items()]
        return Evidence(seen) if seen else None

    def observe(self, nodes: int, rate: float) -> bool:
        """Add a rate; True if a decision may change. One that is no positive number is ignored."""
        if not math.isfinite(rate) or rate <= 0:
            return False
        if not self._rates:
            self.related.append(self)
            del self.related[:-RELATED]
        rates = self._rates.setdefault(nodes, [])
        old = median(rates) if rates else math.inf
        rates.append(rate)
        first_ones = len(rates) in (1, 2, 4, 8)
        del rates[:-REMEMBERED]
        self.__dict__.pop('evidence', None)
        self._curves.clear()
        return self.stated is None and (first_ones or abs(median(rates) - old) > 0.1 * old)

    def forget(self, nodes: int) -> None:
        self._rates.pop(nodes, None)
        self.__dict__.pop('evidence', None)
        self._curves.clear()

    def one_node_rate(self) -> float | None:
        """The rate on one node, measured or by the model; None before the first measurement."""
        return float(self._rates_at([1], 1.0, 0.0)[0]) if self._rates else None

    def curve(
        self, max_nodes: int, assumed_one_node_rate: float, optimism: float | None = None
    ) -> ScalingCurve:
        """For decisions: stated, or modelled and bent to rates; ``optimism`` in deviations."""
        if self.stated is not None:
            return self.stated
        if optimism is None:
            tried = {nodes for profile in (self, *self.related) for nodes in profile._rates}
            optimism = OPTIMISM.get(len(tried), 0.0)
        key = (max_nodes, assumed_one_node_rate, optimism, *self._related())
        if key not in self._curves:
            self._curves.clear()
            counts = points(max_nodes)
            rates = self._rates_at(counts, assumed_one_node_rate, optimism).tolist()
            self._curves[key] = ScalingCurve(tuple(counts), tuple(rates))
        return self._curves[key]

    def best_count(self, counts: Sequence[int]) -> int:
        """The smallest of the fastest ``counts`` (increasing): more nodes would be of no use."""
        curve = self.curve(counts[-1], 1.0)
        if isinstance(counts, range):  # a curve is linear between its corners
            counts = sorted({counts[0], counts[-1], *(n for n in curve.nodes if n in counts)})
        return max(counts, key=curve.rate_at)

    def _related(self) -> list[Evidence]:
        others = [profile.evidence for profile in self.related if profile is not self]
        return [evidence for evidence in others if evidence is not None]

    def _rates_at(
        self, counts: Sequence[int], one_node: float, optimism: float
    ) -> np.typing.NDArray[np.float64]:
        posterior = Posterior(self.evidence, self._related(), one_node)
        mean, spread = posterior.rates(counts)
        if not self._rates:  # without hopes, so that each of several new trainers gets some nodes
            optimism = 0.0
        else:
            known = sorted(self._rates)
            times = np.array([len(self._rates[n]) for n in known])
            rest = np.log([median(self._rates[n]) for n in known]) - posterior.rates(known)[0]
            trusted = rest * times / (times + _HALF_TRUST)
            mean = mean + np.interp(np.log(counts), np.log(known), trusted)
        return np.exp(mean + optimism * spread)


HOPED = 1.4  # a class that nobody has tried is taken to be this much faster, and so tried


class ClassProfiles:
    """A trainer's profile for each node class; ``related``: its function's, by class."""

    def __init__(
        self, trainer: Trainer, related: Callable[[str], list[Profile]] = lambda node_class: []
    ) -> None:
        self._curve = trainer.curve
        self._by_class = dict(trainer.class_curves)
        self._related = related
        self._profiles: dict[str, Profile] = {}

    @property
    def stated(self) -> bool:
        return self._curve is not None or bool(self._by_class)

    @property
    def speeds(self) -> dict[str, float]:
        """The rate on one node of the classes on which it is stated or measured."""
        known = {name: self.on(name) for name in self._by_class} or self.measured
        return {name: _one_node_rate(profile) for name, profile in known.items()}

    @property
    def measured(self) -> dict[str, Profile]:
        return {name: profile for name, profile in self._profiles.items() if profile.measured}

    def on(self, node_class: str) -> Profile:
        if node_class not in self._profiles:
            stated = self._by_class.get(node_class, self._curve)
            self._profiles[node_class] = Profile(stated, self._related(node_class))
        return self._profiles[node_class]

    def best(self) -> Profile:
        """The profile of the class fastest on one node, of those stated or measured, or ''."""
        known = [self.on(name) for name in self._by_class] or list(self.measured.values())
        return max(known, key=_one_node_rate, default=self.on(''))

    def curves(
        self,
        classes: Iterable[str],
        max_nodes: int,
        assumed: float,
        ratio: Callable[[str, str], float],
        optimism: float | None = None,
    ) -> tuple[tuple[str, ScalingCurve], ...]:
        """By class; one never measured has another's, times the ``ratio`` (Sia, SOSP 2023)."""
        if self._by_class:
            return tuple(self._by_class.items())
        if self._curve is not None:
            return ()
        measured = self.measured
        curves = []
        for name in classes:
            if name in measured or not measured or self._related(name):
                curves.append((name, self.on(name).curve(max_nodes, assumed, optimism)))
                continue
            source = max(measured, key=lambda other: len(measured[other].measured))
            known = measured[source].curve(max_nodes, assumed, optimism)
            factor = ratio(name, source)
            rates = tuple(rate * factor for rate in known.rate)
            curves.append((name, ScalingCurve(known.nodes, rates)))
        return tuple(curves)


def speed_ratio(
    trainers: Iterable[ClassProfiles], node_class: str, other: str, unknown: float = HOPED
) -> float:
    """By how much trainers measured on both classes are faster on one; else ``unknown``."""
    logs = []
    for profiles in trainers:
        here, there = profiles.speeds.get(node_class, 0.0), profiles.speeds.get(other, 0.0)
        if here > 0 and there > 0:
            logs.append(math.log(here / there))
    return math.exp(fmean(logs)) if logs else unknown


def _one_node_rate(profile: Profile) -> float:
    if profile.stated is not None:
        return profile.stated.rate_at(1) or profile.stated.rate[-1]
    return profile.one_node_rate() or 0.0


@dataclass
class ShapeChoice:
    """Tries each shape of a node count for :data:`REPORTS` reports, then keeps the fastest."""

    names: Mapping[int, tuple[str, ...]]
    _reports: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _excluded: set[tuple[int, int]] = field(default_factory=set)

    def next(self, nodes: int) -> int:
        """The shape for the next fragment on ``nodes`` nodes, as its place in the list."""
        untried = [s for s in self._usable(nodes) if not self._tried(nodes, s)]
        return untried[0] if untried else self._fastest(nodes, 0)

    def best(self, nodes: int) -> int:
        """The fastest shape that has been tried; the one that is tried first, if there is none."""
        return self._fastest(nodes, self.next(nodes))

    def observe(self, nodes: int, shape: int, rate: float) -> None:
        if not self._tried(nodes, shape):
            self._reports.setdefault((nodes, shape), []).append(rate)

    def change(self, nodes: int, shape: int) -> str:
        """Why a fragment in ``shape`` should go on in another one; empty: it should not."""
        then = self.next(nodes)
        if then == shape or not self._tried(nodes, shape):
            return ''
        how = 'go on in the fastest shape,' if self._tried(nodes, then) else 'try the shape'
        return f'{how} {self.names[nodes][then]}'

    def exclude(self, nodes: int, shape: int) -> bool:
        """Do not use a shape again; whether another one is left for this node count."""
        self._excluded.add((nodes, shape))
        return bool(self._usable(nodes))

    def _usable(self, nodes: int) -> list[int]:
        shapes = range(len(self.names.get(nodes, ('',))))
        return [s for s in shapes if (nodes, s) not in self._excluded]

    def _tried(self, nodes: int, shape: int) -> bool:
        return len(self._reports.get((nodes, shape), ())) >= REPORTS

    def _fastest(self, nodes: int, default: int) -> int:
        tried = [s for s in self._usable(nodes) if self._tried(nodes, s)]
        return max(tried, key=lambda s: self._reports[nodes, s][-1], default=default)
