"""What is new in a site's offers: each is recorded when it begins, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parsl_freetrain.core.model.types import NodeOffer


class OfferChanges:
    """Compares what a site says of the last while, clipped, with what it has said before. An offer
    that is replaced by no later one is over ``stale_s`` seconds after its end.
    """

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._newest: dict[str, NodeOffer] = {}  # of each node
        self._told: dict[str, NodeOffer] = {}

    def new(
        self, offers: Sequence[NodeOffer], now: float, *, last: bool = False
    ) -> tuple[NodeOffer, ...]:
        """Offers that have begun, without an end, or ended (``last``: all of them end here)."""
        over_at = max([now - self._stale_s, *(offer.end for offer in offers)])
        found: dict[tuple[str, float], NodeOffer] = {}
        for offer in sorted(offers, key=lambda offer: (offer.node, offer.start)):
            before = self._newest.get(offer.node)
            if before is not None and offer.start <= before.end:  # it goes on, or is an older one
                offer = NodeOffer(offer.node, before.start, max(before.end, offer.end))
            self._newest[offer.node] = offer
            if not last and offer.end >= over_at:
                offer = NodeOffer(offer.node, offer.start, math.inf)
            if self._told.get(offer.node) != offer:
                self._told[offer.node] = found[offer.node, offer.start] = offer
        return tuple(found.values())
