"""What is known of a trainer's speed: stated by the user, or learned from its fragments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from parsl_freetrain.core.words import ScalingCurve

# Unmeasured node counts are assumed to scale a little below linearly, so that more nodes are worth
# trying, and one more trainer at one node is worth more than one more node for a running one.
ASSUMED_EXPONENT = 0.9
SMOOTHING = 0.5


def scaled(nodes: float) -> float:
    """How many times one node's rate ``nodes`` nodes are assumed to reach."""
    return math.pow(nodes, ASSUMED_EXPONENT)


@dataclass
class Profile:
    """Rates by node count, in samples per second."""

    stated: ScalingCurve | None
    measured: dict[int, float] = field(default_factory=dict)

    def observe(self, nodes: int, rate: float) -> bool:
        """Take in a measured rate; True if the curve changed enough (10 %) to decide anew.

        A rate that is not a positive number (nothing trained yet, a clock that stood still) is no measurement:
        taken at its word, it would end the trainer's claim to any node for good.
        """
        if not math.isfinite(rate) or rate <= 0:
            return False
        old = self.measured.get(nodes)
        new = rate if old is None else old + SMOOTHING * (rate - old)
        self.measured[nodes] = new
        return self.stated is None and (old is None or abs(new - old) > 0.1 * old)

    def one_node_rate(self) -> float | None:
        """Measured rate per node at the smallest measured count; None before the first measurement."""
        if not self.measured:
            return None
        nodes = min(self.measured)
        return self.measured[nodes] / scaled(nodes)

    def curve(self, max_nodes: int, assumed_one_node_rate: float) -> ScalingCurve:
        """The curve to decide by, with a point at each of 1..``max_nodes`` where nothing was stated.

        Between and beyond the measured counts the rate follows the nearest smaller measured count
        (or the nearest larger one) by ``(n / measured n) ** 0.9``.
        """
        if self.stated is not None:
            return self.stated
        if not self.measured:
            return ScalingCurve.from_points({n: assumed_one_node_rate * scaled(n) for n in range(1, max_nodes + 1)})
        points = {}
        for n in range(1, max_nodes + 1):
            base = max((m for m in self.measured if m <= n), default=min(self.measured))
            points[n] = self.measured[base] * scaled(n / base)
        return ScalingCurve.from_points(points)

    def best_count(self, counts: Sequence[int]) -> int:
        """The smallest of these counts (increasing) that trains fastest: more nodes would be of no use."""
        curve = self.curve(counts[-1], 1.0)
        if isinstance(counts, range):  # between its corners a curve is straight
            counts = sorted({counts[0], counts[-1], *(n for n in curve.nodes if n in counts)})
        return max(counts, key=curve.rate_at)
