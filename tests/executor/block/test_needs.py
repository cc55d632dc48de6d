"""What waiting jobs need, in the controller's names of nodes."""

from __future__ import annotations

from parsl_freetrain.core.model.node_demand import BlockNodes, NodeDemand
from parsl_freetrain.core.model.types import BlockRequest
from parsl_freetrain.executor.block.block_record import BlockRecord, nodes_needed


def test_hosts_become_managers_and_jobs_become_blocks() -> None:
    blocks = {
        'b1': BlockRecord('7', BlockRequest(2), managers={'n1': 'm1', 'n2': 'm2'}),
        'b2': BlockRecord('8', BlockRequest(1), noticed=True),
    }
    hosts = frozenset({'n1', 'n2', 'n3', 'n4'})
    found = nodes_needed(
        1.0,
        [NodeDemand('9', 2, hosts, frozenset({'n2', 'n4'}))],
        [
            BlockNodes('7', ('n1', 'n2'), frozenset({'n2'})),
            BlockNodes('8', ('n3',)),
            BlockNodes('6', ('n4',)),
        ],
        blocks,
    )
    assert found.demands == (
        NodeDemand('9', 2, frozenset({'m1', 'm2', 'b2 n3'}), frozenset({'m2'})),
    )
    assert found.blocks == (
        BlockNodes('b1', ('m1', 'm2'), frozenset({'m2'})),
        BlockNodes('b2', ('b2 n3',), leaving=True),
    )
