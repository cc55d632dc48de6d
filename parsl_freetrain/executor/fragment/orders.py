"""Creates the orders for the nodes of a fragment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from parsl_freetrain.executor.fragment.fragment_state import RunningFragment
from parsl_freetrain.executor.fragment.member_order import MemberOrder
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.training import TrainingSpec


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


def member_order(
    fragment: RunningFragment,
    member: int,
    spec: TrainingSpec,
    store: str,
    endpoint: ControlEndpoint,
    hang_s: float,
    at: float,
) -> MemberOrder:
    """One node's instructions for a fragment, sent at that time."""
    action = fragment.action
    shapes = spec.shapes.get(len(fragment.members))
    order = FragmentOrder(
        trainer=fragment.name,
        fragment=fragment.number,
        store=store,
        spec=spec,
        speeds=action.speeds,
        interruptions_per_s=action.interruptions_per_s,
        shape=shapes[action.shape] if shapes else None,
        interface=endpoint.interface,
        hang_s=hang_s,
        handover=fragment.begins_with.handover if fragment.begins_with is not None else None,
        samples=fragment.checkpoint.samples,
    )
    return MemberOrder(
        order,
        member,
        len(fragment.members),
        endpoint.addresses,
        endpoint.port,
        endpoint.cert_dir,
        str(Path(store) / 'logs'),
        endpoint.node_log_dir,
        endpoint.template,
        left_s=None if action.deadline_s is None else action.deadline_s - at,
        exempt_s=None if action.exempt_until_s is None else action.exempt_until_s - at,
    )
