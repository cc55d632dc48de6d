"""Jobs of others that could start, as far as can be seen from outside, and do not."""

from __future__ import annotations

from collections.abc import Collection

FORGET_S = 1800.0
"""Seconds after which an ignored job is considered again."""


class StalledJobs:
    """Since when jobs could have started, and which are not waited for any more.

    Without it, nodes would be given back for ever for a job that waits for what no answer tells,
    such as a licence or a kind of node.

    Parameters
    ----------
    limit_s
        Seconds after which a job that could have started counts as held back by something other
        than nodes.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, float] = {}

    def note(self, served: Collection[str], pending: Collection[str], now: float) -> None:
        """These jobs could start now; ``pending`` are all that wait. Ids; ``now`` in seconds."""
        self._since = {
            job: since
            for job, since in self._since.items()
            if job in pending and now - since < FORGET_S and (job in served or self._over(job, now))
        }
        for job in served:
            self._since.setdefault(job, now)

    def ignored(self, now: float) -> frozenset[str]:
        """The jobs that get no nodes."""
        return frozenset(job for job in self._since if self._over(job, now))

    def _over(self, job: str, now: float) -> bool:
        return now - self._since[job] > self._limit_s
