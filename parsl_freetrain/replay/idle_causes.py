"""Why idle nodes train nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.replay.accounting import Idle, RecordedJob


def why_unused(controller: Controller, runs: Mapping[str, RecordedJob], at: float) -> Idle:
    """Sort the free nodes after a decision; see
    :class:`~parsl_freetrain.replay.accounting.Idle`.
    """
    settings, pool = controller.settings, controller.state.pool
    idle = Idle()
    free: Counter[str] = Counter()  # by class, as below
    lasting: dict[str, Counter[str]] = {}  # by block
    for group in pool.groups.values():
        if group.until_s - at < controller.state.shortest_s:
            idle.too_short += len(group.free)
            continue
        free[group.node_class] += len(group.free)
        if group.until_s - at >= settings.horizon_s:
            lasting.setdefault(group.node_class, Counter())[group.block] += len(group.free)
    if not free.total():
        return idle
    used = len(pool.holder)
    allowed = min(
        math.inf if settings.max_nodes is None else settings.max_nodes,
        free.total() + used - settings.keep_free,
    )
    idle.kept_free = kept = int(max(free.total() - max(allowed - used, 0), 0))
    together = sum if settings.spans_blocks else max
    for node_class, count in free.items():
        there = min(kept, count)
        kept -= there
        _sort(
            controller,
            runs,
            node_class,
            count - there,
            min(count - there, together(lasting.get(node_class, {'': 0}).values())),
            idle,
        )
    return idle


def _sort(
    controller: Controller,
    runs: Mapping[str, RecordedJob],
    node_class: str,
    free: int,
    lasting: int,
    idle: Idle,
) -> None:
    """Add the free nodes of one class, of which some last for the horizon."""
    could_start = could_grow = 0
    for name, bidder in controller.state.active.items():
        run = runs[name]
        if bidder.running is not None and run.nodes:
            if bidder.running.node_class == node_class:
                could_grow += max(run.wanted - run.nodes, 0)
        elif run.trainer.min_nodes <= lasting and run.trainer.uses(node_class):
            could_start += run.wanted
    stranded = min(lasting, could_start)
    not_worth = min(free - stranded, could_grow)
    idle.stranded += stranded
    idle.not_worth += not_worth
    idle.no_use += free - stranded - not_worth
