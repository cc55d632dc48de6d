"""What a machine's user guide says about its queues, as checked data of a site config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.batch.options import Mode


@dataclass(frozen=True)
class QueueLimits:
    """One queue of a machine.

    Attributes
    ----------
    nodes, walltime_s
        Minimum and maximum of a job; walltimes in seconds.
    jobs
        Maximum number of one user's jobs that wait.
    preemptible
        Whether its jobs may be preempted.
    """

    nodes: tuple[int, int]
    walltime_s: tuple[int, int]
    jobs: int
    preemptible: bool = False

    def __post_init__(self) -> None:
        if not (
            1 <= self.nodes[0] <= self.nodes[1]
            and 1 <= self.walltime_s[0] <= self.walltime_s[1]
            and self.jobs >= 1
        ):
            raise BadInput(
                f'{self} is no queue: there must be at least 1 node, 1 second and 1 job, '
                'and no least above its most.'
            )

    def settings(self, longest_s: float) -> dict[str, Any]:
        """Settings for the site's options.

        ``longest_s``, in seconds, is the maximum walltime of a block, unless the queue's is less.
        """
        return {
            'least_nodes': self.nodes[0],
            'most_nodes': self.nodes[1],
            'shortest_s': self.walltime_s[0],
            'longest_s': min(longest_s, self.walltime_s[1]),
            'max_waiting': min(4, self.jobs),
            'mode': Mode.PREEMPTIBLE if self.preemptible else Mode.BACKFILL,
        }


def limits_of(machine: str, queues: Mapping[str, QueueLimits], queue: str) -> QueueLimits:
    """The limits of a queue.

    Raises
    ------
    BadInput
        The machine has no such queue.
    """
    if queue not in queues:
        raise BadInput(f'{machine} has no queue {queue!r} for blocks; it has {", ".join(queues)}.')
    return queues[queue]


def needed(machine: str, what: str, value: str | None, how: str) -> str:
    """A setting that no job of the machine may lack.

    Raises
    ------
    BadInput
        It is missing.
    """
    if not value:
        raise BadInput(f'{machine} takes no job without {what}; {how}.')
    return value
