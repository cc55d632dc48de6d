"""Idle nodes of a schedule at one time."""

import numpy as np

from parsl_freetrain.sites.idle_schedule import Schedule


def idle_at(schedule: Schedule, at_s: float) -> tuple[str, ...]:
    """The nodes idle at ``at_s`` seconds, sorted; one is busy again at its interval's end."""
    idle = schedule.node_index[(schedule.starts <= at_s) & (at_s < schedule.ends)]
    return tuple(schedule.nodes[i] for i in sorted(idle.tolist()))


def change_times(schedule: Schedule) -> tuple[float, ...]:
    """Every time in seconds at which a node becomes idle or busy, increasing, each once."""
    return tuple(np.unique(np.concatenate([schedule.starts, schedule.ends])).tolist())
