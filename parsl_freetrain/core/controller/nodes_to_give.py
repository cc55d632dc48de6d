"""Which nodes are given back because jobs of others wait that would start on them: the fewest that
serve all of these jobs, then those that fewer other jobs could use, those that the scheduler would
give first, and those with fragments that are cheapest to stop. A node that cannot be given back
alone goes with its whole block. The fragments there are stopped first, then all nodes of a decision
are released together, so that a job that needs several gets all.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from parsl_freetrain.core.controller.controller_state import ControllerState, Yielded
from parsl_freetrain.core.controller.node_pool import PoolNode
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockNodes, NodeDemand, in_need


class _Group(NamedTuple):
    """Nodes alike: block, released alone, holder, useful jobs, given already, spare."""

    block: int
    alone: bool
    holder: str
    serves: tuple[bool, ...]
    given: bool
    spare: bool
    first: bool


def nodes_to_give(
    demands: Sequence[NodeDemand],
    blocks: Sequence[BlockNodes],
    holder: Mapping[str, str],
    cost: Mapping[str, float],
    given: Collection[str] = (),
) -> frozenset[str]:
    """Names of the nodes to give back, those that go with their blocks included; deterministic.
    ``demands``: in order of priority; each counts that can be served beside those before it.
    ``holder``: trainers on nodes; ``cost``: of stopping them; nodes ``given`` cost nothing.
    """
    found = _serving_all(demands, blocks, holder, cost, given)
    if found is not None:
        return found
    found, kept = frozenset(), list[NodeDemand]()
    for demand in demands:
        more = _serving_all([*kept, demand], blocks, holder, cost, given)
        if more is not None:
            kept.append(demand)
            found = more
    return found


def _serving_all(
    demands: Sequence[NodeDemand],
    blocks: Sequence[BlockNodes],
    holder: Mapping[str, str],
    cost: Mapping[str, float],
    given: Collection[str],
) -> frozenset[str] | None:
    """The nodes that serve all demands, or None, by an integer programme over equal nodes."""
    import pulp  # slow to import, and seldom needed

    groups = _groups(demands, blocks, holder, given)
    lp = pulp.LpProblem('nodes_to_give', pulp.LpMinimize)
    whole = [lp.add_variable(f'block_{b}', cat=pulp.LpBinary) for b in range(len(blocks))]
    holders = enumerate(sorted({key.holder for key in groups if key.holder}))
    stopped = {name: lp.add_variable(f'trainer_{i}', cat=pulp.LpBinary) for i, name in holders}
    counts = []
    for i, (key, names) in enumerate(groups.items()):
        count = lp.add_variable(f'group_{i}', 0, len(names), cat=pulp.LpInteger)
        counts.append(count)
        lp += count >= len(names) * whole[key.block]
        if not key.alone:
            lp += count <= len(names) * whole[key.block]
        if key.holder:
            lp += count <= len(names) * stopped[key.holder]
    serving = {
        (i, j): lp.add_variable(f'group_{i}_job_{j}', 0)
        for i, key in enumerate(groups)
        for j, serves in enumerate(key.serves)
        if serves and not demands[j].shared
    }
    for j, demand in enumerate(demands):
        served_by: list[pulp.LpVariable] = (
            [count for key, count in zip(groups, counts, strict=True) if key.serves[j]]
            if demand.shared
            else [v for (_, job), v in serving.items() if job == j]
        )
        lp += pulp.lpSum(served_by) >= demand.nodes
    for i, count in enumerate(counts):
        lp += pulp.lpSum(v for (group, _), v in serving.items() if group == i) <= count
    node_cost, stop_cost = _costs(groups, cost)
    of_nodes = (node_cost[key] * count for key, count in zip(groups, counts, strict=True))
    of_stops = (stop_cost[name] * variable for name, variable in stopped.items())
    lp.setObjective(pulp.lpSum(of_nodes) + pulp.lpSum(of_stops))
    lp.solve(pulp.HiGHS(msg=False, gapRel=0.0, gapAbs=0.0, threads=1))
    if lp.sol_status != pulp.LpSolutionOptimal:
        return None
    taken = [round(count.value() or 0.0) for count in counts]
    every = zip(groups.values(), taken, strict=True)
    return frozenset(name for names, count in every for name in names[:count])


def _groups(
    demands: Sequence[NodeDemand],
    blocks: Sequence[BlockNodes],
    holder: Mapping[str, str],
    given: Collection[str],
) -> dict[_Group, list[str]]:
    spare, first = (
        frozenset[str]().union(*(getattr(demand, what) for demand in demands))
        for what in ('spare', 'first')
    )
    groups: dict[_Group, list[str]] = {}
    for b, block in enumerate(blocks):
        for name in sorted(block.nodes):
            serves = tuple(name in demand.among for demand in demands)
            held_by, alone = holder.get(name, ''), name in block.releasable
            kind = name in given, name in spare, name in first
            groups.setdefault(_Group(b, alone, held_by, serves, *kind), []).append(name)
    return groups


def _costs(
    groups: Mapping[_Group, Sequence[str]], cost: Mapping[str, float]
) -> tuple[dict[_Group, float], dict[str, float]]:
    """A node weighs more than all not spare, those than all not first, those than fragments."""
    nodes = sum(map(len, groups.values()))
    holders = {key.holder for key in groups if key.holder}
    going = {key.holder for key in groups if key.given}
    later = 0.2 / max(nodes, 1)
    scale = 0.5 * later / max(sum(cost.get(name, 0.0) for name in holders), 1e-9)
    of_node = {key: nodes + 0.5 * (not key.spare) + later * (not key.first) for key in groups}
    of_node |= {key: 0.0 for key in groups if key.given}
    ends = {name: 0.0 if name in going else scale * cost.get(name, 0.0) for name in holders}
    return of_node, ends


def give_back(state: ControllerState, event: ev.NodesNeeded) -> list[ev.StopFragment]:
    """Choose nodes for waiting jobs, and stop fragments there, at a rescale's measured cost."""
    blocks = [block for block in event.blocks if block.block in state.blocks]
    ours = [node for block in blocks for node in block.nodes]
    holder = {node: state.pool.holder[node] for node in ours if node in state.pool.holder}
    cost = {
        name: trainer.measured.costs(trainer.trainer)[1] * len(trainer.running.nodes)
        for name in set(holder.values())
        if (trainer := state.trainers[name]).running
    }
    taken = {node for block in blocks if block.leaving for node in block.nodes}
    given = nodes_to_give(event.demands, blocks, holder, cost, taken.union(state.yielded)) - taken
    why = f'{in_need(demand.job for demand in event.demands)} waits for its nodes'
    for block in blocks:
        nodes = [node for node in block.nodes if node in given or node in state.yielded]
        for node in nodes:
            if node not in state.yielded and node in state.pool.nodes:
                state.pool.join(PoolNode(node, block.block, event.at))  # nothing starts there
            known = state.yielded.get(node)
            by_s = known.by_s if known else event.at + state.settings.give_back_s
            state.yielded[node] = Yielded(block.block, len(nodes) == len(block.nodes), why, by_s)
    actions: list[ev.StopFragment] = []
    for name in sorted({holder[node] for node in given if node in holder}):
        running = state.trainers[name].running
        state.changed[name] = None
        leaving = tuple(node for node in running.nodes if node in given) if running else ()
        actions += state.ask_to_stop(name, why, leaving)
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
            gone = replace(block.request, nodes=len(nodes))
            state.charges.ended(gone, block.begun_s, at)
            block.request = replace(gone, nodes=block.request.nodes - len(nodes))
            block.arrived.difference_update(nodes)
            actions.append(ev.ReleaseNodes(name, tuple(sorted(nodes)), last.why))
    state.yielded.clear()
    return actions
