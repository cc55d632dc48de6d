"""The reservation of an EASY backfill scheduler for the job at the head of the queue.

EASY (Lifka 1995; Mu'alem and Feitelson, IEEE TPDS 12(6), 2001) starts waiting jobs in order. The
first job that does not fit gets a reservation at the *shadow time*: the time when enough nodes are
free if every running job uses its whole requested time. Nodes that are free then and that it does
not need are *extra*. Other jobs may start now if they end by the shadow time or run on extra nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from parsl_freetrain.replay.trace import Floats


@dataclass(frozen=True)
class Reservation:
    """The reservation of the job at the head of the queue.

    Attributes
    ----------
    shadow_s
        When the job starts, in seconds; infinite if no job waits.
    extra
        Number of nodes that are free at that time and that the job does not need.
    """

    shadow_s: float
    extra: int


NOTHING_RESERVED = Reservation(math.inf, 0)


def reserve(
    needed: int, idle: int, expected: Iterable[tuple[float, int]], now: float
) -> Reservation:
    """The reservation of a job.

    Parameters
    ----------
    needed
        Number of nodes of the job.
    idle
        Number of nodes that are free now.
    expected
        Latest end and number of nodes of each running job, in order of time. A job whose time is
        over is expected to end at once.
    now
        In seconds.
    """
    free, shadow_s = idle, now
    for end, nodes in expected:
        if free >= needed and end > shadow_s:
            break
        free += nodes
        shadow_s = max(end, now)
    return Reservation(shadow_s, free - needed) if free >= needed else NOTHING_RESERVED


def promises(reservation: Reservation, asking: int, kept: Floats, now: float) -> Floats:
    """Times until which the reservation leaves idle nodes alone.

    Parameters
    ----------
    reservation
        The present reservation of the head of the queue.
    asking
        Number of idle nodes without a promise.
    kept
        Times until which the other idle nodes are promised, in seconds.
    now
        In seconds.

    Returns
    -------
    array
        For each of the asking nodes, in increasing order: the shadow time, or infinite for extra
        nodes that are not already used up by promises beyond it; ``now`` if the reservation begins
        now.
    """
    if reservation.shadow_s == math.inf:
        return np.full(asking, math.inf)
    beyond = max(reservation.extra - int((kept > reservation.shadow_s).sum()), 0)
    found = np.full(asking, max(reservation.shadow_s, now))
    found[max(asking - beyond, 0) :] = math.inf
    return found
