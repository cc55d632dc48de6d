"""One node's instructions for a fragment, whom it reports to, and what its ranks came to."""

import signal
import time
from dataclasses import dataclass, replace
from typing import Literal

from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.messages import Outcome, RankEnd

_WORKER = 'DataLoader worker (pid'  # torch's words


@dataclass(frozen=True)
class RankResult:
    rank: int  #: rank, node, log: the rank, the name of its node, and the path of its log
    node: str
    log: str
    outcome: Outcome | None = None  #: its last message; None: it died without one
    status: int | None = None  #: exit status, or minus the signal that ended it; None: unknown
    #: Why it was killed, as the end of a sentence that begins with the rank; empty if it was not.
    killed: str = ''
    #: Whether the kernel ended it, or a process that it needs, because memory was full.
    out_of_memory: bool = False

    @property
    def how(self) -> RankEnd | Literal['hung', 'died']:
        """The ending in its outcome; without an outcome, 'hung' if it was killed, else 'died'."""
        if self.outcome is not None:
            return self.outcome.how
        return 'hung' if self.killed else 'died'

    def may_lack_memory(self, status: int) -> bool:
        """Whether SIGKILL has ended it, or its data loader's worker, for no known reason."""
        if self.outcome is None:
            return status == -signal.SIGKILL and not self.killed
        said = self.worker_died
        return 'killed by signal: Killed' in said or 'exited unexpectedly' in said

    @property
    def worker_died(self) -> str:
        """What it says of a worker of its data loader that has died; empty: none has."""
        error = self.outcome.error if self.outcome is not None else None
        return error.message if error is not None and _WORKER in error.message else ''

    @property
    def ok(self) -> bool:
        return self.how in ('finished', 'stopped')

    def __str__(self) -> str:
        return f'rank {self.rank} on {self.node}' if self.node else f'rank {self.rank}'

    @property
    def fault(self) -> str:
        return self.outcome.error.message if self.outcome and self.outcome.error else ''

    @property
    def ended_how(self) -> str:
        """Its exit status as the end of a sentence that begins with the rank."""
        if self.status is None:
            return 'died'
        if self.status < 0:
            return f'was ended by {signal.Signals(-self.status).name}'
        return f'exited with status {self.status}'

    def suffers(self) -> int:
        """How likely it ended because of another rank (NCCL aborts those that lost a peer)."""
        if self.how == 'hung':
            return 0
        ended_by = -(self.status or 0)
        return 1 if ended_by > 0 and ended_by != signal.SIGABRT else 2


@dataclass(frozen=True)
class ControlEndpoint:
    addresses: list[str]  #: addresses, port, cert_dir: the executor's control channel
    port: int
    cert_dir: str | None
    interface: str | None
    node_log_dir: str  #: folder for the logs of the nodes' fork servers
    #: Name of the fork server of this computer that forks those of its nodes; None: there is none.
    template: str | None = None


@dataclass(frozen=True)
class MemberOrder:
    fragment: FragmentOrder  #: the order for the ranks
    #: member, members: this node's index and the number of nodes; its first rank follows.
    member: int
    members: int
    endpoint: ControlEndpoint
    log_dir: str  #: folder for the ranks' output
    #: Maximum seconds that standby ranks wait; None: this order is for the fragment itself.
    ahead_s: float | None = None
    #: Seconds until the nodes are taken away, from when this order was sent; None: unknown.
    left_s: float | None = None
    exempt_s: float | None = None  #: in which nothing preempts the fragment; None: something may

    def received(self) -> 'MemberOrder':
        """The order with times of this node, which may have another clock."""
        now = time.monotonic()
        deadline = None if self.left_s is None else now + self.left_s
        exempt_until = None if self.exempt_s is None else now + self.exempt_s
        fragment = replace(self.fragment, deadline=deadline, exempt_until=exempt_until)
        return replace(self, fragment=fragment)
