"""A trainer's speed by node count, stated by the user or measured in its fragments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from parsl_freetrain.core.model.types import ScalingCurve

# Unmeasured node counts are assumed to scale a little below linearly, so that more nodes are worth
# trying, and one more trainer at one node is worth more than one more node for a running one.
ASSUMED_EXPONENT = 0.9
SMOOTHING = 0.5


def scaled(nodes: float) -> float:
    """The assumed speed of ``nodes`` nodes, relative to one node."""
    return math.pow(nodes, ASSUMED_EXPONENT)


@dataclass
class Profile:
    """Rates by node count, in samples per second."""

    stated: ScalingCurve | None
    measured: dict[int, float] = field(default_factory=dict)

    def observe(self, nodes: int, rate: float) -> bool:
        """Add a measured rate; True if the curve changed enough (10 %) for a new decision.

        A rate that is not a positive number (nothing trained yet, a clock that stood still) is
        ignored: otherwise the trainer would never get a node again.
        """
        if not math.isfinite(rate) or rate <= 0:
            return False
        old = self.measured.get(nodes)
        new = rate if old is None else old + SMOOTHING * (rate - old)
        self.measured[nodes] = new
        return self.stated is None and (old is None or abs(new - old) > 0.1 * old)

    def one_node_rate(self) -> float | None:
        """Measured rate per node at the smallest measured count; None before the first
        measurement.
        """
        if not self.measured:
            return None
        nodes = min(self.measured)
        return self.measured[nodes] / scaled(nodes)

    def curve(self, max_nodes: int, assumed_one_node_rate: float) -> ScalingCurve:
        """The curve for decisions. If none was stated, it has a point at each of 1..``max_nodes``.

        Between and beyond the measured counts the rate follows the nearest smaller measured count
        (or the nearest larger one) by ``(n / measured n) ** 0.9``.
        """
        if self.stated is not None:
            return self.stated
        if not self.measured:
            return ScalingCurve.from_points(
                {n: assumed_one_node_rate * scaled(n) for n in range(1, max_nodes + 1)}
            )
        points = {}
        for n in range(1, max_nodes + 1):
            base = max((m for m in self.measured if m <= n), default=min(self.measured))
            points[n] = self.measured[base] * scaled(n / base)
        return ScalingCurve.from_points(points)

    def best_count(self, counts: Sequence[int]) -> int:
        """The smallest of the fastest ``counts`` (increasing): more nodes would be of no use."""
        curve = self.curve(counts[-1], 1.0)
        if isinstance(counts, range):  # a curve is linear between its corners
            counts = sorted({counts[0], counts[-1], *(n for n in curve.nodes if n in counts)})
        return max(counts, key=curve.rate_at)
