"""What schedulers say, as frozen records: jobs, nodes, reservations and queues. Times in seconds of ``time.time()``.

The words are Slurm's, which has the most of them; other schedulers' are translated.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One line of the queue.

    Attributes
    ----------
    state
        Slurm's word, such as ``'PENDING'``, ``'COMPLETING'`` or ``'NODE_FAIL'``.
    nodes
        How many nodes it has or asks for.
    start_s, end_s
        When it started or is expected to, and when it ends at the latest; None where Slurm does not know.
    planned
        The nodes that the scheduler means to give a pending job; empty where it has no plan.
    names
        The nodes it has; empty while pending.
    reason
        Why it waits, in Slurm's word.
    restarts
        How often it was requeued; 0 where the form of the answer does not tell.
    """

    job_id: str
    state: str
    partition: str
    nodes: int
    start_s: float | None = None
    end_s: float | None = None
    planned: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    user: str = ''
    reason: str = ''
    name: str = ''
    restarts: int = 0


@dataclass(frozen=True)
class Nodes:
    """Nodes of one partition that are alike.

    Attributes
    ----------
    state
        Slurm's word in lower case, without marks: ``'idle'``, ``'planned'``, ``'allocated'``, ...
    marks
        What stands behind the state: ``'*'`` does not answer, ``'~'`` powered down, ``'$'`` maintenance, and so on;
        ``'?'`` for each such thing in a document.
    gpus
        GPUs on each.
    until_s
        When the scheduler means to need them; None where it says so only of its jobs.
    """

    partition: str
    names: tuple[str, ...]
    state: str
    marks: str = ''
    features: tuple[str, ...] = ()
    gpus: int = 0
    until_s: float | None = None


@dataclass(frozen=True)
class Reservation:
    """Nodes that are set aside from ``start_s`` to ``end_s``, for maintenance or for somebody else."""

    name: str
    start_s: float
    end_s: float
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Partition:
    """What a partition, or queue, allows.

    Attributes
    ----------
    longest_s
        Its time limit in seconds; None: unlimited.
    shortest_s
        A job must ask for so many seconds at least.
    least_nodes, most_nodes
        Size of a job; most None: unlimited.
    most_waiting
        So many jobs of one user may wait; None: unlimited.
    preempt_mode
        ``'OFF'``, ``'CANCEL'``, ``'REQUEUE'``, ...
    grace_s
        What a preempted job gets before it is killed, in seconds.
    accounts, denied_accounts, qos
        Who may use it; empty: everybody.
    """

    name: str
    up: bool = True
    longest_s: float | None = None
    least_nodes: int = 0
    most_nodes: int | None = None
    preempt_mode: str = 'OFF'
    grace_s: float = 0.0
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    shortest_s: float = 0.0
    most_waiting: int | None = None


class NotUnderstood(ValueError):
    """An answer that is not as documented."""
