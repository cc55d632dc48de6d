"""Why idle nodes train nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.replay.accounting import Idle, RecordedJob


def why_unused(controller: Controller, runs: Mapping[str, RecordedJob], at: float) -> Idle:
    """Sort the free nodes after a decision; see
    :class:`~parsl_freetrain.replay.accounting.Idle`.
    """
    settings, pool = controller.settings, controller.state.pool
    idle = Idle()
    free = lasting = 0
    by_block: dict[str, int] = {}
    for group in pool.groups.values():
        if group.until_s - at < controller.state.shortest_s:
            idle.too_short += len(group.free)
            continue
        free += len(group.free)
        if group.until_s - at >= settings.horizon_s:
            by_block[group.block] = by_block.get(group.block, 0) + len(group.free)
    if not free:
        return idle
    used = len(pool.holder)
    allowed = min(
        math.inf if settings.max_nodes is None else settings.max_nodes,
        free + used - settings.keep_free,
    )
    idle.kept_free = int(max(free - max(allowed - used, 0), 0))
    free -= idle.kept_free
    lasting = min(
        free, sum(by_block.values()) if settings.spans_blocks else max(by_block.values(), default=0)
    )
    could_start = could_grow = 0
    for name in controller.state.turn:
        run = runs[name]
        if run.nodes:
            could_grow += max(run.wanted - run.nodes, 0)
        elif run.trainer.min_nodes <= lasting:
            could_start += run.wanted
    idle.stranded = min(lasting, could_start)
    idle.not_worth = min(free - idle.stranded, could_grow)
    idle.no_use = free - idle.stranded - idle.not_worth
    return idle
