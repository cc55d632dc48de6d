"""A trainer's speed by node count, stated by the user or learned from its fragments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np

from parsl_freetrain.core.controller.scaling_model import Evidence, Posterior, points
from parsl_freetrain.core.model.types import ScalingCurve

OPTIMISM = {1: 3.0, 2: 0.5}
"""Once a trainer has been measured, decisions take its other counts to be faster than expected by
this many standard deviations, so that they are tried; by the number of counts of its function that
have been measured. What a try costs is in the decision: a rescale.
"""

CAUTION = 0.5
"""The same as long as there are trainers of which nothing is known: these bid without hopes, and
must not lose their nodes to the hopes of others.
"""

REMEMBERED = 15
"""Maximum number of measurements of a count that its typical rate is the median of."""

RELATED = 20
"""Maximum number of trainers of the same function to learn from."""

# A rate at a measured count counts as much as the model after this number of measurements.
_HALF_TRUST = 3


@dataclass
class Profile:
    """Rates by node count, in samples per second.

    Attributes
    ----------
    stated
        The curve that the user stated; None: it is learned.
    related
        Profiles of the trainers of the same function, which they share; a profile adds itself when
        it is first measured.
    """

    stated: ScalingCurve | None
    related: list[Profile] = field(default_factory=list, repr=False, compare=False)
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
        """What the measurements say; None before the first one."""
        seen = [(n, rate, len(self._rates[n])) for n, rate in self.measured.items()]
        return Evidence(seen) if seen else None

    def observe(self, nodes: int, rate: float) -> bool:
        """Add a measured rate; True if the curve may have changed enough for a new decision: at the
        first, second, fourth and eighth measurement of a count, and if its typical rate has changed
        by 10 %.

        A rate that is not a positive number (nothing trained yet, a clock that stood still) is
        ignored: otherwise the trainer would never get a node again.
        """
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
        """Forget the rates at a count, which were those of a slower shape."""
        self._rates.pop(nodes, None)
        self.__dict__.pop('evidence', None)
        self._curves.clear()

    def one_node_rate(self) -> float | None:
        """The rate on one node, measured or as the model has it; None before the first
        measurement.
        """
        return float(self._rates_at([1], 1.0, 0.0)[0]) if self._rates else None

    def curve(
        self, max_nodes: int, assumed_one_node_rate: float, optimism: float | None = None
    ) -> ScalingCurve:
        """The curve for decisions; if none was stated, the model's, bent to the measured rates.

        Parameters
        ----------
        max_nodes
            The last count of a learned curve.
        assumed_one_node_rate
            Used as long as no trainer of this function has been measured.
        optimism
            Standard deviations above what to expect; None: as :data:`OPTIMISM` says.
        """
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
