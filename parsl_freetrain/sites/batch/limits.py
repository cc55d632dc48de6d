"""What a machine's user guide says about its queues, as checked data of a site config."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.core.model.errors import BadInput


@dataclass(frozen=True)
class QueueLimits:
    """One queue of a machine; times in seconds, prices in the unit of the machine's accounts."""

    nodes: tuple[int, int]  #: minimum and maximum of a job
    walltime_s: tuple[int, int]  #: the same
    jobs: int  #: maximum number of one user's jobs that wait
    preemptible: bool = False
    exempt_s: float = 0.0  #: after its start, in which a job is not preempted
    price: float = 1.0  #: of a node for an hour
    #: every node costs at least ``least_price`` an hour for so long, also if its job ends before
    least_s: float = 0.0
    least_price: float = 0.0
    partition: str | None = None  #: of Slurm, where the limits depend on more than it

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
        """Settings; ``longest_s``: most seconds that a block may take, or the queue's if less."""
        return {
            'least_nodes': self.nodes[0],
            'most_nodes': self.nodes[1],
            'shortest_s': self.walltime_s[0],
            'longest_s': min(longest_s, self.walltime_s[1]),
            'max_waiting': min(4, self.jobs),
            'mode': 'preemptible' if self.preemptible else 'backfill',
            'exempt_s': self.exempt_s,
            'price': self.price,
            'least_charge_s': self.least_s,
            'least_charge_price': self.least_price,
        }


def limits_of(machine: str, queues: Mapping[str, QueueLimits], queue: str) -> QueueLimits:
    if queue not in queues:
        raise BadInput(f'{machine} has no queue {queue!r} for blocks; it has {", ".join(queues)}.')
    return queues[queue]


def needed(machine: str, what: str, value: str | None, how: str) -> str:
    """A setting that no job of the machine may lack. Raises BadInput if it is missing."""
    if not value:
        raise BadInput(f'{machine} takes no job without {what}; {how}.')
    return value


def paying(machine: str, account: str | None, how: str) -> str:
    """The given account, or FREETRAIN_ACCOUNT's, or BadInput that says ``how`` to find its name."""
    account = account or os.environ.get('FREETRAIN_ACCOUNT')
    how = f'give account="PROJECT", or set FREETRAIN_ACCOUNT; {how}'
    return needed(machine, 'an account', account, how)


def on_file_systems(
    machine: str, filesystems: tuple[str, ...], known: tuple[str, ...]
) -> tuple[str, ...]:
    """The file systems that a job needs. Raises BadInput for none, or one not of the machine."""
    unknown = [name for name in filesystems if name not in known]
    if unknown or not filesystems:
        said = 'takes no job without its file systems'
        said = f'has no file system {unknown[0]!r}' if unknown else said
        raise BadInput(
            f'{machine} {said}; give filesystems= those that your files are on, of '
            f'{", ".join(known)}.'
        )
    return filesystems
