"""Jobs of others that could start, as far as can be seen from outside, and do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping

FORGET_S = 1800.0
"""Seconds after which an ignored job is considered again, and a node may suit a job again."""
UNWILLING_S = 30.0
"""Seconds in which other runs give back what jobs need; then their blocks count as jobs."""


class StalledJobs:
    """Since when jobs could have started, and which are not waited for any more. Without it, nodes
    would be given back for ever for a job that waits for what no answer tells, such as a licence;
    and a job that needs more memory than the idle nodes have would seem to be served by them, and
    get no node of ours. ``limit_s``: seconds after which a job that could have started counts as
    held back by something other than nodes. After half of them, the nodes that were idle all the
    time count as unsuitable.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: dict[str, float] = {}
        self._idle: dict[str, tuple[float, frozenset[str]]] = {}
        self._unsuitable: dict[str, tuple[float, frozenset[str]]] = {}
        self._asked: dict[str, float] = {}

    def note(
        self,
        served: Collection[str],
        lacking: Collection[str],
        pending: Collection[str],
        idle: frozenset[str],
        now: float,
        asked: Collection[str] = (),
    ) -> None:
        """Note what an answer says. By ids: ``served``, the jobs that could start now; ``lacking``,
        those of them that lack nodes of blocks; ``pending``, all that wait; ``asked``, blocks of
        other runs that have to be given back. ``idle``: names of the nodes that are idle.
        """
        self._asked = {
            block: since
            for block, since in self._asked.items()
            if now - since < FORGET_S and (block in asked or now - since > UNWILLING_S)
        }
        for block in asked:
            self._asked.setdefault(block, now)
        self._since = {
            job: since
            for job, since in self._since.items()
            if job in pending and now - since < FORGET_S and (job in served or self._over(job, now))
        }
        for job in served:
            self._since.setdefault(job, now)
        self._idle = {
            job: (since, names & idle)
            for job in served
            if job not in lacking
            for since, names in [self._idle.get(job, (now, idle))]
        }
        self._unsuitable = {
            job: (since, names)
            for job, (since, names) in self._unsuitable.items()
            if job in pending and now - since < FORGET_S
        }
        for job, (since, names) in self._idle.items():
            if names and now - since > self._limit_s / 2:
                _, before = self._unsuitable.get(job, (now, frozenset[str]()))
                self._unsuitable[job] = now, before | names

    def ignored(self, now: float) -> frozenset[str]:
        return frozenset(job for job in self._since if self._over(job, now))

    def unwilling(self, now: float) -> frozenset[str]:
        """The blocks of other runs that count as ordinary jobs."""
        return frozenset(b for b, since in self._asked.items() if now - since > UNWILLING_S)

    def unsuitable(self) -> Mapping[str, frozenset[str]]:
        """Nodes on which a job, by its id, could have started and did not."""
        return {job: names for job, (_, names) in self._unsuitable.items()}

    def _over(self, job: str, now: float) -> bool:
        return now - self._since[job] > self._limit_s
