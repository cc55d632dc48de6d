"""Which nodes were idle for us when, put together from looks at the machine."""

from __future__ import annotations

from collections.abc import Iterable

from parsl_freetrain.sites.protocols import Offer


class OfferLog:
    """Looks become intervals: a node that is there in two looks, not further apart than ``gap_s`` seconds, was there between them."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s
        self._offers: list[Offer] = []
        self._open: dict[str, Offer] = {}

    def note(self, at: float, names: Iterable[str]) -> None:
        """These nodes, and no others, are idle or have a block of ours, at a time in seconds of ``time.time()``."""
        there = set(names)
        for name in [n for n, offer in self._open.items() if n not in there or at - offer.end > self._gap_s]:
            offer = self._open.pop(name)
            self._offers.append(Offer(name, offer.start, at if at - offer.end <= self._gap_s else offer.end))
        for name in there:
            self._open[name] = Offer(name, self._open[name].start if name in self._open else at, at)

    def between(self, since: float, until: float) -> tuple[Offer, ...]:
        """All intervals, clipped to these times in seconds of ``time.time()``."""
        clipped = (Offer(o.node, max(since, o.start), min(until, o.end)) for o in (*self._offers, *self._open.values()))
        return tuple(offer for offer in clipped if offer.end > offer.start)
