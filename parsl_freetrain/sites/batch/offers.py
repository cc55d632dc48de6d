"""Which nodes were idle for us and when, put together from the scheduler's answers."""

from __future__ import annotations

from collections.abc import Iterable

from parsl_freetrain.core.model.types import NodeOffer


class OfferLog:
    """Turns answers into intervals.

    A node that is in two answers was there between them, if they are at most ``gap_s`` seconds
    apart.
    """

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._offers: list[NodeOffer] = []
        self._open: dict[str, NodeOffer] = {}

    def note(self, at: float, names: Iterable[str]) -> None:
        """At this time, in seconds of ``time.time()``, exactly these nodes are idle or ours."""
        there = set(names)
        for name in [
            n for n, offer in self._open.items() if n not in there or at - offer.end > self._gap_s
        ]:
            offer = self._open.pop(name)
            self._offers.append(
                NodeOffer(name, offer.start, at if at - offer.end <= self._gap_s else offer.end)
            )
        for name in there:
            self._open[name] = NodeOffer(
                name, self._open[name].start if name in self._open else at, at
            )

    def between(self, since: float, until: float) -> tuple[NodeOffer, ...]:
        """All intervals, clipped to these times in seconds of ``time.time()``."""
        clipped = (
            NodeOffer(o.node, max(since, o.start), min(until, o.end))
            for o in (*self._offers, *self._open.values())
        )
        return tuple(offer for offer in clipped if offer.end > offer.start)
