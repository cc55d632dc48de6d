"""A trainer's speed on each node class: stated, learned, or transferred from another class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import fmean

from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

HOPED = 1.4
"""A class that nobody has tried is taken to be this much faster than a known one, so that it is
tried. What a try costs is in the decision: a rescale.
"""


class ClassProfiles:
    """The profiles of one trainer, one for each node class.

    Where nodes are not told apart, there is one class, whose name is empty.

    Parameters
    ----------
    trainer
        The trainer, with the curves that its user has stated.
    related
        The profiles on a class of the trainers of the same function, which they share.
    """

    def __init__(
        self, trainer: Trainer, related: Callable[[str], list[Profile]] = lambda node_class: []
    ) -> None:
        self._curve = trainer.curve
        self._by_class = dict(trainer.class_curves)
        self._related = related
        self._profiles: dict[str, Profile] = {}

    @property
    def stated(self) -> bool:
        """Whether its user has stated its speed."""
        return self._curve is not None or bool(self._by_class)

    @property
    def speeds(self) -> dict[str, float]:
        """The rate on one node of the classes on which it is stated or measured."""
        known = {name: self.on(name) for name in self._by_class} or self.measured
        return {name: _one_node_rate(profile) for name, profile in known.items()}

    @property
    def measured(self) -> dict[str, Profile]:
        """The profiles with measurements, by class."""
        return {name: profile for name, profile in self._profiles.items() if profile.measured}

    def on(self, node_class: str) -> Profile:
        """The profile on a class."""
        if node_class not in self._profiles:
            stated = self._by_class.get(node_class, self._curve)
            self._profiles[node_class] = Profile(stated, self._related(node_class))
        return self._profiles[node_class]

    def best(self) -> Profile:
        """The profile of the fastest class on one node, of those that are stated or measured; if
        there is none, that of nodes that are not told apart.
        """
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
        """The curve on each class for decisions.

        A class on which neither it nor a trainer of its function has been measured has the curve
        of one on which it has, times the ratio of speeds on one node, as in Sia (SOSP 2023).

        Parameters
        ----------
        max_nodes, assumed, optimism
            See :meth:`Profile.curve`.
        ratio
            By how much trainers are faster on one node of the first class than of the second.
        """
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
    """By how much trainers are faster on one node of one class than of another: the geometric mean
    over those whose speed on both is known; ``unknown`` if there are none.
    """
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
