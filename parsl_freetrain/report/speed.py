"""A trainer's speed in samples per second, learned from its fragments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.types import ScalingCurve
from parsl_freetrain.ledger.rows import ProgressRow, RunHistory


class Speed:
    """Learns a trainer's speed as the controller does, report by report.

    A curve that the user stated may be in any unit. It gives the shape; the measurement on the
    smallest node count gives the scale.

    Parameters
    ----------
    spec
        The trainer's specification in the ledger: ``min_nodes``, ``max_nodes`` and possibly
        ``curve``.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        given = spec.get('curve')
        self.stated = (
            ScalingCurve(tuple(map(int, given['nodes'])), tuple(map(float, given['rate'])))
            if given
            else None
        )
        self._most = int(spec.get('max_nodes') or 1)
        self._profile = Profile(None)
        self._curves: dict[int, ScalingCurve | None] = {}  # a cache, cleared by each new report

    @property
    def measured(self) -> dict[int, float]:
        """The typical rate by measured count."""
        return self._profile.measured

    def observe(self, nodes: int, rate: float | None) -> None:
        """Add the speed that a fragment on ``nodes`` nodes reports, in samples per second."""
        if rate is not None and nodes:
            self._profile.observe(nodes, rate)
            self._curves.clear()

    def curve(self, nodes: int = 1) -> ScalingCurve | None:
        """Samples per second, up to the maximum of ``max_nodes``, the measured counts and
        ``nodes``; None before the first measurement.
        """
        most = max(self._most, nodes)
        if most not in self._curves:
            self._curves[most] = self._curve(most)
        return self._curves[most]

    def _curve(self, most: int) -> ScalingCurve | None:
        measured = self._profile.measured
        if not measured:
            return None
        if self.stated is None:
            return self._profile.curve(max(most, *measured), 1.0, optimism=0.0)
        base = min(measured)
        shape = self.stated.rate_at(base)
        if shape <= 0:
            return None
        factor = measured[base] / shape
        return ScalingCurve(self.stated.nodes, tuple(rate * factor for rate in self.stated.rate))


def speeds(story: RunHistory, progress: Iterable[ProgressRow]) -> dict[str, Speed]:
    """By trainer; all runs of a resumed workflow count."""
    width = {fragment.key: len(fragment.nodes) for fragment in story.fragments}
    found = {row.name: Speed(row.spec) for row in story.trainers}
    for report in progress:
        found[report.trainer].observe(
            width.get((report.run, report.trainer, report.fragment), 0), report.rate
        )
    return found
