"""Which holes are worth a block, and which blocks are given back."""

from __future__ import annotations

import math
from collections.abc import Iterable

from parsl_freetrain.core.events import Action, CloseBlock, OpenBlock
from parsl_freetrain.core.state import ControllerSettings, ControllerState
from parsl_freetrain.core.words import BlockRequest, Hole


def nodes_on_their_way(state: ControllerState) -> int:
    """How many nodes open blocks were asked for that have not joined yet."""
    return sum(max(block.request.nodes - len(block.arrived), 0) for block in state.blocks.values())


def nodes_wanted(state: ControllerState, settings: ControllerSettings) -> int:
    """How many nodes could be used beyond those that are here or on their way; 0 or less: enough."""
    bidders = state.turn.values()
    here = len(state.pool.nodes)
    if settings.spans_blocks:
        wanted = sum(t.wanted_nodes() for t in bidders) - here
    else:  # a running fragment cannot grow beyond its block
        wanted = sum(t.wanted_nodes() for t in bidders if t.running is None) - (here - len(state.pool.holder))
    if settings.max_nodes is not None:
        wanted = min(wanted, settings.max_nodes - here)
    return max(wanted, math.ceil(state.ordinary / settings.workers_per_node) - here) - nodes_on_their_way(state)


def blocks_to_open(
        state: ControllerState, settings: ControllerSettings, at: float, holes: Iterable[Hole]) -> list[OpenBlock]:
    """A block for each hole that is long enough, largest first, while more nodes are wanted.

    Nothing is opened that no trainer could start on: it would only be given back and asked for again.
    """
    if state.shutting_down:
        return []
    usable = [hole for hole in holes if hole.until_s is None or hole.until_s - at >= settings.min_hole_s]
    usable.sort(key=lambda hole: (-hole.nodes, hole.names))
    wanted = nodes_wanted(state, settings)
    room = settings.max_blocks - len(state.blocks)
    least = _least_useful(state, settings, sum(hole.nodes for hole in usable[:max(room, 0)]))
    opened: list[OpenBlock] = []
    for hole in usable:
        if wanted <= 0 or len(opened) >= room:
            break
        nodes = min(hole.nodes, wanted)
        if nodes < least:
            continue
        walltime_s = None if hole.until_s is None else hole.until_s - at
        opened.append(OpenBlock(BlockRequest(nodes, walltime_s, hole.queue, hole.names[:nodes])))
        wanted -= nodes
    return opened


def _least_useful(state: ControllerState, settings: ControllerSettings, offered: int) -> float:
    """The smallest block on which something could start, in nodes; infinite if nothing could, whatever is opened."""
    if state.ordinary:
        return 1
    smallest = min((t.trainer.min_nodes for t in state.turn.values()), default=math.inf)
    if not settings.spans_blocks:
        return smallest
    return 1 if len(state.pool.nodes) + nodes_on_their_way(state) + offered >= smallest else math.inf


def idle_blocks(state: ControllerState, settings: ControllerSettings, at: float) -> list[Action]:
    """Give back blocks on which nothing has run for a while; asked again after as long, should one stay open."""
    closing: list[Action] = []
    for name, block in state.blocks.items():
        if not block.arrived or state.ordinary or state.pool.busy.get(name):
            block.idle_since = None
        elif block.idle_since is None:
            block.idle_since = at
        elif at - block.idle_since >= settings.idle_block_s:
            block.idle_since = at
            closing.append(CloseBlock(name, f'nothing has run on it for {settings.idle_block_s:g} s'))
    return closing
