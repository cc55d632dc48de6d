"""Notices nodes whose clocks differ from the submitting computer's. Nothing depends on them."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

WARN_S = 2.0
"""Difference of two clocks, in seconds, that is worth a warning."""


class NodeClocks:
    """The differences of nodes' clocks, measured whenever a node greets or begins a fragment."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def measured(self, node: str, sent_at: float, clock: float, heard_at: float) -> None:
        """A node read its clock between two times of this run: warn once if it is off."""
        ahead_s = clock - heard_at if clock > heard_at else min(0.0, clock - sent_at)
        if not clock or abs(ahead_s) < WARN_S:
            self._warned.discard(node)
        elif node not in self._warned:
            self._warned.add(node)
            logger.warning(
                "The clock of node %s is %.0f s %s the submitting computer's. Training does not "
                'depend on it, but schedulers and file times may: have it set (NTP).',
                node,
                abs(ahead_s),
                'ahead of' if ahead_s > 0 else 'behind',
            )
