"""Traces from schedules of idle nodes: a CSV file ``start_s,end_s,node``, or a synthetic one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.sites.idle_schedule import Schedule, read_schedule
from parsl_freetrain.sites.synthetic_schedule import SUMMIT_IDLE_SHARE, SUMMIT_NODES, generate

WEEK_S = 7 * 86_400.0


def read_idle(
    path: str | Path,
    nodes: int | None = None,
    since: float | None = None,
    until: float | None = None,
) -> Trace:
    """Read idle intervals, as observed on some machine, from CSV ``start_s,end_s,node``, plain or
    gzipped; see :func:`parsl_freetrain.sites.idle_schedule.read_schedule`. No ends are known in
    advance. The window is that of the file, from 0 to the last end, or the part requested as for
    :meth:`Trace.window`. Raises BadInput, with file and line, for an invalid file or empty window.
    """
    return part_of(path, of_schedule(read_schedule(path)), nodes, since, until)


def synthetic(
    seed: int,
    nodes: int = SUMMIT_NODES,
    duration_s: float = WEEK_S,
    idle_share: float = SUMMIT_IDLE_SHARE,
) -> Trace:
    """A synthetic trace with the published statistics of OLCF Summit, those that
    :func:`parsl_freetrain.sites.synthetic_schedule.generate` names: number of nodes, length in
    seconds, mean share of idle nodes. The same arguments give the same trace to the last bit.
    Raises BadInput for one out of its range.
    """
    schedule = generate(nodes, duration_s, seed, idle_share=idle_share)
    names = tuple(f'node{i:04d}' for i in range(nodes))
    place = {name: i for i, name in enumerate(names)}
    index = np.array([place[name] for name in schedule.nodes], dtype=np.int64)[schedule.node_index]
    unknown = np.full(len(schedule), math.inf)
    return Trace(names, 0.0, duration_s, schedule.starts, schedule.ends, index, unknown)


def of_schedule(schedule: Schedule) -> Trace:
    """The trace of a schedule, from 0 to its last end; raises BadInput where it is empty."""
    return Trace(
        schedule.nodes,
        0.0,
        schedule.end_s,
        schedule.starts,
        schedule.ends,
        schedule.node_index,
        np.full(len(schedule), math.inf),
        tuple(schedule.node_classes[node] for node in schedule.nodes if schedule.node_classes),
    )


def part_of(
    path: str | Path, trace: Trace, nodes: int | None, since: float | None, until: float | None
) -> Trace:
    """A window of a trace from ``path``, which errors name."""
    try:
        return trace.window(nodes, since, until)
    except BadInput as error:
        raise BadInput(f'{path}: {error}') from None
