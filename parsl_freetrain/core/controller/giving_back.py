"""Gives nodes back that jobs of others wait for: stops the fragments there, then releases them.

All nodes of one decision are released together, so that a job that needs several gets all of them
before the scheduler can fill the first ones with another job.
"""

from __future__ import annotations

from dataclasses import replace

from parsl_freetrain.core.controller.controller_state import ControllerState, Yielded
from parsl_freetrain.core.controller.node_pool import PoolNode
from parsl_freetrain.core.controller.nodes_to_give import nodes_to_give
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.node_demand import in_need


def give_back(
    state: ControllerState, settings: ControllerSettings, event: ev.NodesNeeded
) -> list[ev.StopFragment]:
    """Choose nodes for the waiting jobs, and stop the fragments that run there.

    Stopping a fragment costs the measured pause of a rescale on all of its nodes, in node-seconds.
    """
    blocks = [block for block in event.blocks if block.block in state.blocks]
    holder = {
        node: state.pool.holder[node]
        for block in blocks
        for node in block.nodes
        if node in state.pool.holder
    }
    cost = {
        name: trainer.measured.costs(trainer.trainer)[1] * len(trainer.running.nodes)
        for name in set(holder.values())
        if (trainer := state.trainers[name]).running
    }
    taken = {node for block in blocks if block.leaving for node in block.nodes}
    going = taken.union(state.yielded)
    given = nodes_to_give(event.demands, blocks, holder, cost, going) - taken
    why = f'{in_need(demand.job for demand in event.demands)} waits for its nodes'
    for block in blocks:
        nodes = [node for node in block.nodes if node in given or node in state.yielded]
        for node in nodes:
            if node not in state.yielded and node in state.pool.nodes:
                state.pool.join(PoolNode(node, block.block, event.at))  # nothing starts there
            known = state.yielded.get(node)
            by_s = known.by_s if known else event.at + settings.give_back_s
            state.yielded[node] = Yielded(block.block, len(nodes) == len(block.nodes), why, by_s)
    actions = []
    for name in sorted({holder[node] for node in given if node in holder}):
        running = state.trainers[name].running
        state.changed[name] = None
        if running and not running.stopping and not running.broken:
            state.stop(name, running)
            leaving = tuple(node for node in running.nodes if node in given)
            actions.append(ev.StopFragment(name, running.number, why, leaving=leaving))
    return actions


def releases(state: ControllerState, at: float) -> list[ev.Action]:
    """Release all nodes that are to be given back, once no fragment runs on any of them."""
    waited_for = [y for node, y in state.yielded.items() if node in state.pool.holder]
    if any(at < yielded.by_s for yielded in waited_for):
        return []
    by_block: dict[str, list[str]] = {}
    for node, yielded in state.yielded.items():
        by_block.setdefault(yielded.block, []).append(node)
    actions: list[ev.Action] = []
    for name, nodes in by_block.items():
        last = state.yielded[nodes[-1]]
        if last.whole_block:
            actions.append(ev.CloseBlock(name, last.why))
        else:
            block = state.blocks[name]
            block.request = replace(block.request, nodes=block.request.nodes - len(nodes))
            block.arrived.difference_update(nodes)
            actions.append(ev.ReleaseNodes(name, tuple(sorted(nodes)), last.why))
    state.yielded.clear()
    return actions
