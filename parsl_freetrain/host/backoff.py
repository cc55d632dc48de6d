"""Pauses between tries that grow while something fails."""

from __future__ import annotations


class Backoff:
    """Pauses that double from the first to the longest; ``failures``: since the last success."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s, self._next_s = first_s, longest_s, first_s
        self.failures = 0

    def failed(self) -> float:
        """Count a failure; returns the seconds to wait before the next try."""
        pause_s = min(self._next_s, self._longest_s)
        self._next_s = 2 * pause_s
        self.failures += 1
        return pause_s

    def reset(self) -> None:
        self._next_s, self.failures = self._first_s, 0
