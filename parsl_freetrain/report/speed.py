"""A trainer's speed in samples per second on each node class, learned from its fragments."""

from __future__ import annotations

from collections import defaultdict

from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.state import Fragment, History, RunState
from parsl_freetrain.core.model.types import ScalingCurve, Trainer

Place = tuple[int, str]
"""Node count and node class; the class is empty where nodes are not told apart."""


def place_of(run: RunState, fragment: Fragment) -> Place:
    """Where a fragment ran; nodes of several classes at once are ``a+b``."""
    blocks = {run.nodes[node].block for node in fragment.nodes if node in run.nodes}
    classes = {run.blocks[name].opened.request.node_class for name in blocks if name in run.blocks}
    return len(fragment.nodes), '+'.join(sorted(classes - {''}))


class Speed:
    """Learns a trainer's speed as the controller does, report by report. A curve that the user
    stated may be in any unit: it gives the shape, the measurement on the fewest nodes the scale.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.stated = trainer.curve
        self._most = trainer.max_nodes
        self._profiles: dict[str, Profile] = defaultdict(lambda: Profile(None))
        # A cache, cleared by each new report.
        self._curves: dict[Place, ScalingCurve | None] = {}

    @property
    def measured(self) -> dict[str, dict[int, float]]:
        """By node class, the typical rate by measured count."""
        return {name: profile.measured for name, profile in sorted(self._profiles.items())}

    def observe(self, place: Place, rate: float | None) -> None:
        """Add the speed in samples per second that a fragment there reports."""
        nodes, node_class = place
        if rate is not None and nodes:
            self._profiles[node_class].observe(nodes, rate)
            self._curves.clear()

    def curve(self, nodes: int = 1, node_class: str = '') -> ScalingCurve | None:
        """Samples per second, for ``nodes`` and all counts known; None: not measured yet."""
        place = max(self._most, nodes), node_class
        if place not in self._curves:
            self._curves[place] = self._curve(*place)
        return self._curves[place]

    def _curve(self, most: int, node_class: str) -> ScalingCurve | None:
        measured = self.measured.get(node_class)
        if not measured:
            return None
        if self.stated is None:
            profile = self._profiles[node_class]
            return profile.curve(max(most, *measured), 1.0, optimism=0.0)
        base = min(measured)
        shape = self.stated.rate_at(base)
        if shape <= 0:
            return None
        factor = measured[base] / shape
        return ScalingCurve(self.stated.nodes, tuple(rate * factor for rate in self.stated.rate))


def speeds(history: History) -> dict[str, Speed]:
    """By trainer; all runs of a resumed workflow count."""
    trainers = {one.name: one.trainer for one in history.trainings}
    found = {name: Speed(trainer) for name, trainer in trainers.items()}
    for run in history.runs:
        for fragment in run.fragments.values():
            place = place_of(run, fragment)
            for report in fragment.progress if fragment.trainer in found else ():
                found[fragment.trainer].observe(place, report.rate)
    return found
