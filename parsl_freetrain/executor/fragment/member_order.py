"""One node's instructions for a fragment, and whom it reports to."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from parsl_freetrain.training.spec.fragment_order import FragmentOrder


@dataclass(frozen=True)
class MemberOrder:
    fragment: FragmentOrder  #: the order for the ranks
    #: member, members: this node's index and the number of nodes; its first rank follows.
    member: int
    members: int
    addresses: list[str]  #: addresses, port, cert_dir: the executor's control channel
    port: int
    cert_dir: str | None
    log_dir: str  #: folder for the ranks' output
    node_log_dir: str  #: folder for the logs of the nodes' fork servers
    #: Name of the fork server of this computer that forks those of its nodes; None: there is none.
    template: str | None = None
    #: Maximum seconds that standby ranks wait; None: this order is for the fragment itself.
    ahead_s: float | None = None
    #: Seconds until the nodes are taken away, from when this order was sent; None: unknown.
    left_s: float | None = None
    exempt_s: float | None = None  #: in which nothing preempts the fragment; None: something may

    def received(self) -> MemberOrder:
        """The order with times of this node, which may have another clock."""
        now = time.monotonic()
        deadline = None if self.left_s is None else now + self.left_s
        exempt_until = None if self.exempt_s is None else now + self.exempt_s
        fragment = replace(self.fragment, deadline=deadline, exempt_until=exempt_until)
        return replace(self, fragment=fragment)


@dataclass(frozen=True)
class ControlEndpoint:
    """Address of the control channel, as seen from nodes. ``node_log_dir``: for the logs of their
    fork servers. ``template``: the fork server of this computer that forks those, if there is one.
    """

    addresses: list[str]
    port: int
    cert_dir: str | None
    interface: str | None
    node_log_dir: str
    template: str | None = None
