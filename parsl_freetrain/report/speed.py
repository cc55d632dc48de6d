"""A trainer's speed in samples per second on each node class, learned from its fragments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.ledger.rows import ProgressRow, RunHistory

Place = tuple[int, str]
"""Node count and node class; the class is empty where nodes are not told apart."""


def places_of(history: RunHistory) -> dict[tuple[int, str, int], Place]:
    """Where each fragment ran, by its key; nodes of several classes at once are ``a+b``."""
    blocks = {(block.run, block.block): block.node_class for block in history.blocks}
    classes = {(n.run, n.node): blocks.get((n.run, n.block), '') for n in history.nodes}
    return {
        f.key: (
            len(f.nodes),
            '+'.join(sorted({classes.get((f.run, node), '') for node in f.nodes} - {''})),
        )
        for f in history.fragments
    }


class Speed:
    """Learns a trainer's speed as the controller does, report by report.

    A curve that the user stated may be in any unit. It gives the shape; the measurement on the
    smallest node count gives the scale. ``spec``: the trainer's specification in the ledger:
    ``min_nodes``, ``max_nodes`` and possibly ``curve``.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        given = spec.get('curve')
        self.stated = (
            ScalingCurve(tuple(map(int, given['nodes'])), tuple(map(float, given['rate'])))
            if given
            else None
        )
        self._most = int(spec.get('max_nodes') or 1)
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
        """Samples per second, up to the maximum of ``max_nodes``, the measured counts and
        ``nodes``; None before the first measurement on this class.
        """
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


def speeds(history: RunHistory, progress: Iterable[ProgressRow]) -> dict[str, Speed]:
    """By trainer; all runs of a resumed workflow count."""
    places = places_of(history)
    found = {row.name: Speed(row.spec) for row in history.trainers}
    for report in progress:
        place = places.get((report.run, report.trainer, report.fragment), (0, ''))
        found[report.trainer].observe(place, report.rate)
    return found
