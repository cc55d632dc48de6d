"""What nodes cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Charge:
    """What nodes of a queue cost, in the unit of the machine's accounts.

    Attributes
    ----------
    price
        Of a node for an hour.
    least_s, least_price
        Every node costs ``least_price`` an hour for the first ``least_s`` seconds, also if its
        block ends before.
    """

    price: float = 0.0
    least_s: float = 0.0
    least_price: float = 0.0

    def cost(self, nodes: int, lasts_s: float) -> float:
        """What a block of this number of nodes costs that lasts for ``lasts_s`` seconds."""
        later_s = max(0.0, lasts_s - self.least_s)
        later = later_s * self.price if self.price else 0.0  # also if it lasts for ever
        return nodes / 3600 * (self.least_s * self.least_price + later)


FREE = Charge()
