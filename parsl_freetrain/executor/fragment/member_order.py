"""One node's instructions for a fragment."""

from __future__ import annotations

from dataclasses import dataclass

from parsl_freetrain.training.spec.fragment_order import FragmentOrder


@dataclass(frozen=True)
class MemberOrder:
    """One node's instructions for a fragment.

    Attributes
    ----------
    fragment
        The order for the ranks.
    member, members
        This node's index and the number of nodes. The node's first rank is ``member *
        fragment.per_node``.
    addresses, port, cert_dir
        The executor's control channel.
    log_dir
        Folder for the ranks' output.
    node_log_dir
        Folder for the logs of the nodes' fork servers.
    template
        Name of the fork server of this computer that forks those of its nodes; None: there is none.
    ahead_s
        Maximum seconds that standby ranks for the next fragment wait; None: this order is for the
        fragment itself.
    """

    fragment: FragmentOrder
    member: int
    members: int
    addresses: list[str]
    port: int
    cert_dir: str | None
    log_dir: str
    node_log_dir: str
    template: str | None = None
    ahead_s: float | None = None
