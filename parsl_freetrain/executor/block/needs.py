"""What waiting jobs need of a site's nodes, as the controller knows these nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from parsl_freetrain.core.model.events import NodesNeeded
from parsl_freetrain.core.model.node_demand import BlockNodes, NodeDemand
from parsl_freetrain.executor.block.block_record import BlockRecord


def nodes_needed(
    at: float,
    demands: Iterable[NodeDemand],
    held: Iterable[BlockNodes],
    blocks: Mapping[str, BlockRecord],
) -> NodesNeeded:
    """The demands, with blocks and managers in place of jobs and host names. A node that has not
    joined has a name of its own.
    """
    of_job = {block.job_id: (name, block) for name, block in blocks.items()}
    known = [(*of_job[nodes.block], nodes) for nodes in held if nodes.block in of_job]
    manager: dict[str, str] = {}
    for name, block, nodes in known:
        manager |= {host: block.managers.get(host, f'{name} {host}') for host in nodes.nodes}

    def managers(hosts: frozenset[str]) -> frozenset[str]:
        return frozenset(manager[host] for host in hosts & manager.keys())

    return NodesNeeded(
        at,
        tuple(replace(d, among=managers(d.among), spare=managers(d.spare)) for d in demands),
        tuple(
            BlockNodes(
                name,
                tuple(manager[host] for host in nodes.nodes),
                managers(nodes.releasable),
                block.noticed,
            )
            for name, block, nodes in known
        ),
    )
