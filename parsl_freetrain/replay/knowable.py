"""What an EASY backfill scheduler has promised: the one reservation, that of the job at the head of the queue.

EASY (Lifka 1995; Mu'alem and Feitelson, IEEE TPDS 12(6), 2001) starts waiting jobs in order. The first that does not fit gets a
reservation at the *shadow time*, when enough nodes are free if every running job ends when its requested time is over; nodes
that will be free then beyond its needs are *extra*. Others may start now if they are over by the shadow time, or on extra nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from parsl_freetrain.replay.trace import Floats


@dataclass(frozen=True)
class Reservation:
    """The nodes that the head of the queue is to have.

    Attributes
    ----------
    shadow_s
        When it is to start, in seconds; infinite where no job waits.
    extra
        How many of the nodes that are free at that time it does not need.
    """

    shadow_s: float
    extra: int


NOTHING_RESERVED = Reservation(math.inf, 0)


def reserve(needed: int, idle: int, expected: Iterable[tuple[float, int]], now: float) -> Reservation:
    """The reservation of a job.

    Parameters
    ----------
    needed
        Its nodes.
    idle
        How many nodes are free now.
    expected
        When running jobs are over at the latest, and how many nodes each has, in order of time. One whose time is over
        already is expected to end at once.
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
    """Until when each of some idle nodes is left alone by the reservation.

    Parameters
    ----------
    reservation
        That of the head of the queue now.
    asking
        How many idle nodes have no promise now.
    kept
        Until when the other idle nodes were promised, in seconds.
    now
        In seconds.

    Returns
    -------
    array
        For each of the asking nodes, in increasing order: the shadow time, or infinite for as many as are extra and
        not promised beyond it before; ``now`` where the reservation begins now.
    """
    if reservation.shadow_s == math.inf:
        return np.full(asking, math.inf)
    beyond = max(reservation.extra - int((kept > reservation.shadow_s).sum()), 0)
    found = np.full(asking, max(reservation.shadow_s, now))
    found[max(asking - beyond, 0):] = math.inf
    return found
