"""Decides which holes get a block, and which blocks are given back."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from parsl_freetrain.core.allocation.constraints import OWNERS, reachable_sums
from parsl_freetrain.core.controller.budgets import affordable
from parsl_freetrain.core.controller.controller_state import ControllerState, TrainerState
from parsl_freetrain.core.controller.throughput_profile import speed_ratio
from parsl_freetrain.core.model.events import Action, CloseBlock, OpenBlock
from parsl_freetrain.core.model.types import BlockRequest, Hole, Trainer


def nodes_on_their_way(state: ControllerState) -> int:
    return sum(max(block.request.nodes - len(block.arrived), 0) for block in state.blocks.values())


def nodes_wanted(state: ControllerState) -> int:
    """Number of nodes that could be used beyond those available or on their way; may be below 0."""
    here = len(state.pool.nodes)
    wanted = _within_caps(state, [(t.trainer, _wanted_by(t, state)) for t in state.active.values()])
    if state.settings.max_nodes is not None:
        wanted = min(wanted, state.settings.max_nodes)
    ordinary = math.ceil(state.ordinary / state.settings.workers_per_node)
    wanted = max(wanted + _spare(state), ordinary)
    return wanted - here - nodes_on_their_way(state)


def _spare(state: ControllerState) -> int:
    return state.settings.keep_free if state.active else 0


def _wanted_by(trainer: TrainerState, state: ControllerState) -> int:
    if trainer.running is None or state.settings.spans_blocks:
        return trainer.wanted_nodes()
    # It cannot grow beyond its block.
    return sum(node in state.pool.holder for node in trainer.running.nodes)


def _within_caps(state: ControllerState, wanted: list[tuple[Trainer, int]]) -> int:
    """The number of nodes that the caps allow trainers together, given what each wants."""
    totals = [sum(count for _, count in wanted)]
    for kind in OWNERS if state.settings.caps else ():
        by_owner: Counter[str] = Counter()
        for trainer, count in wanted:
            by_owner[f'{kind} {getattr(trainer, kind)}'] += count
        caps = state.settings.caps
        totals.append(sum(min(n, caps.get(owner, n)) for owner, n in by_owner.items()))
    return min(totals)


def blocks_to_open(state: ControllerState, at: float, holes: Iterable[Hole]) -> list[OpenBlock]:
    """A block for each hole that is long enough and affordable, while more nodes are wanted."""
    if state.shutting_down:
        return []
    usable = _usable(state, at, holes)
    offered = {hole.node_class for hole in usable}
    slower = {node_class: _slower(state, node_class, offered) for node_class in offered}
    # Fast classes first: what they provide is not asked of slower ones.
    usable.sort(key=lambda h: (-slower[h.node_class][0], h.price(at), -h.nodes, h.names))
    left = state.charges.left(block.request for block in state.blocks.values())
    wanted = nodes_wanted(state)
    if state.settings.spans_blocks:
        sure = len(state.pool.nodes) + nodes_on_their_way(state)
        spare = _spare(state)
        more = min(wanted, sum(hole.nodes for hole in usable))
        wanted = _that_fit(state, sure + more - spare) + spare - sure
    room = state.settings.max_blocks - len(state.blocks)
    least = _least_useful(state, sum(hole.nodes for hole in usable[: max(room, 0)]))
    opened: list[OpenBlock] = []
    for hole in usable:
        nodes = min(affordable(hole, left, at), wanted + slower[hole.node_class][1])
        if len(opened) >= room:
            break
        if nodes <= 0:
            continue
        if not state.settings.spans_blocks:
            nodes = _that_fit(state, nodes)
        if nodes < least:
            continue
        walltime_s = None if hole.until_s is None else hole.until_s - at
        names, node_class = hole.names[:nodes], hole.node_class
        price: Any = {'charge': hole.charge, 'lasts_s': hole.lasts_s(at), 'exempt_s': hole.exempt_s}
        request = BlockRequest(nodes, walltime_s, hole.queue, names, node_class=node_class, **price)
        opened.append(OpenBlock(request))
        wanted -= nodes
        left -= hole.charge.cost(nodes, request.lasts_s) if left < math.inf else 0.0
    return opened


def _usable(state: ControllerState, at: float, holes: Iterable[Hole]) -> list[Hole]:
    """The holes long enough for some trainer, of a class that one uses, not too dear."""
    bidders = state.active.values()
    all_of_use = bool(state.ordinary) or not bidders
    return [
        hole
        for hole in holes
        if (hole.until_s is None or hole.until_s - at >= state.shortest_s)
        and (all_of_use or any(t.trainer.uses(hole.node_class) for t in bidders))
        and (state.settings.max_price is None or hole.price(at) <= state.settings.max_price)
    ]


def charges_spent(state: ControllerState, at: float, holes: Iterable[Hole]) -> str:
    """Why no trainer can go on within the charge budget and maximum price, a clause; or empty."""
    if state.blocks or state.shutting_down or not state.trainers:
        return ''
    offered, most = list(holes), state.settings.max_price
    cheapest = min((hole.charge.price for hole in offered), default=0.0)
    if most is not None and cheapest > most:
        return f'a node costs at least {cheapest:g} an hour, above max_price={most:g}; raise it'
    usable = _usable(state, at, offered)
    least = _least_useful(state, sum(hole.nodes for hole in usable))
    return state.charges.too_dear(usable, least, at)


def _slower(state: ControllerState, node_class: str, offered: set[str]) -> tuple[int, int]:
    """How many classes are surely slower, and their nodes, no reason to do without this one."""
    if not node_class:
        return 0, 0
    profiles = [t.profiles for t in state.active.values()]
    cost_s = max((t.measured.costs(t.trainer)[0] for t in state.active.values()), default=0.0)
    enough = 1 + max(0.1, 2 * cost_s / state.settings.horizon_s)
    there: Counter[str] = Counter()
    for block in state.blocks.values():
        there[block.request.node_class] += block.request.nodes
    others = [one for one in offered | there.keys() if one not in ('', node_class)]
    slower = [one for one in others if speed_ratio(profiles, node_class, one, 1.0) > enough]
    return len(slower), sum(there[other] for other in slower)


def _that_fit(state: ControllerState, nodes: int) -> int:
    """How many of these nodes the trainers can hold together, given the counts each may have."""
    bidders = state.active.values()
    if state.ordinary or nodes <= 0 or not bidders or not all(t.trainer.sizes for t in bidders):
        return nodes
    return reachable_sums([t.trainer.counts() for t in bidders], nodes).bit_length() - 1


def _least_useful(state: ControllerState, offered: int) -> float:
    """Nodes of the smallest block on which a trainer could start; infinite if there is none."""
    if state.ordinary:
        return 1
    smallest = min((t.trainer.counts()[0] for t in state.active.values()), default=math.inf)
    if not state.settings.spans_blocks:
        return smallest
    nodes = len(state.pool.nodes) + nodes_on_their_way(state) + offered
    return 1 if nodes >= smallest else math.inf


def idle_blocks(state: ControllerState, at: float) -> list[Action]:
    """Give back blocks that have been idle for a while; again after that time if one stays open."""
    closing: list[Action] = []
    spare = _spare(state)
    for name, block in state.blocks.items():
        if not block.arrived or state.ordinary or state.pool.busy.get(name):
            block.idle_since = None
        elif block.idle_since is None:
            block.idle_since = at
        elif 0 < len(block.nodes) <= spare:
            spare -= len(block.nodes)
        elif at - block.idle_since >= state.settings.idle_block_s:
            block.idle_since = at
            idle_s = state.settings.idle_block_s
            closing.append(CloseBlock(name, f'nothing has run on it for {idle_s:g} s'))
    return closing
