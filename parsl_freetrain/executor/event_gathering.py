"""Gathers events that belong together, so that one decision handles them all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from parsl_freetrain.executor import commands as co
from parsl_freetrain.executor.block.blocks import GreetingReturned
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.training.spec.messages import FromMember, Notice

GATHER_S = 0.05
"""Seconds to wait for other nodes after one has joined, so that one decision handles them all."""
LONGEST_GATHER_S = 4 * GATHER_S
"""Maximum seconds to wait if many nodes join one after the other."""


def gather(control: ControlServer, timeout_s: float, expected: Callable[[], int]) -> list[Any]:
    """Waiting commands and members' messages, in order; waits ``timeout_s`` at most for the first.
    ``expected``: number of nodes that have not answered their first task. If some but not all of
    them answer, wait for more.
    """
    items = new = list(control.receive(timeout_s))
    begun = time.monotonic()
    until = begun
    while (joined := sum(map(_joins, items))) and joined < expected():
        if any(map(_urgent, new)):
            break
        if any(map(_joins, new)):
            until = min(time.monotonic() + GATHER_S, begun + LONGEST_GATHER_S)
        left = until - time.monotonic()
        if left <= 0:
            break
        new = list(control.receive(left))
        items = [*items, *new]
    return items


def _joins(item: Any) -> bool:
    return isinstance(item, GreetingReturned) and item.done.exception() is None


def _urgent(item: Any) -> bool:
    """Whether this must not wait for other nodes."""
    return isinstance(item, (co.CancelTrainer, co.Quiesce, co.Stop)) or (
        isinstance(item, FromMember) and isinstance(item.message, Notice)
    )
