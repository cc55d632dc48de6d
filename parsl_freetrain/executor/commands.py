"""Commands to the event loop from other threads, and how events are gathered for one decision."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from parsl_freetrain.core.model.types import Checkpoint, NodeOffer
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.block.blocks import GreetingReturned
from parsl_freetrain.executor.fragment.control_channel import ControlServer
from parsl_freetrain.executor.fragment.runner import MemberReturned
from parsl_freetrain.executor.fragment.trainer_record import TellReplica, TrainerRecord
from parsl_freetrain.training.spec.messages import FromMember, Notice


class CancelTrainer(NamedTuple):
    trainer: str


class TaskArrived(NamedTuple):
    """Parsl has passed on a fragment's task; ``outer`` is the future that Parsl waits for."""

    context: Mapping[str, Any]
    buffer: bytes
    outer: Future[Checkpoint]


class SchedulerAnswered(NamedTuple):
    """The scheduler has answered; the blocks can be polled."""


class OrdinaryTasks(NamedTuple):
    change: int


class Quiesce(NamedTuple):
    """Stop every fragment with a checkpoint; ``quiet`` is set when the last one has ended."""

    quiet: threading.Event


class Stop(NamedTuple):
    """End the event loop."""


_Answer = TaskArrived | MemberReturned | GreetingReturned | SchedulerAnswered
_Trainers = TrainerRecord | CancelTrainer | TellReplica
Command = _Trainers | AdoptedBlock | OrdinaryTasks | Quiesce | Stop | _Answer

GATHER_S = 0.05  # seconds to wait for more nodes after one has joined: one decision handles them
LONGEST_GATHER_S = 4 * GATHER_S  # maximum seconds to wait if many nodes join one after the other
SUBMITTED_S = 0.05  # the same for trainers: a decision for each would slow down who submits many


def gather(
    control: ControlServer,
    timeout_s: float,
    expected: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """Commands and messages, in order: waits ``timeout_s`` for the first, then for others alike."""
    items = new = list(control.receive(timeout_s))
    begun = clock()
    until = begun
    while _submitted(items) or ((joined := sum(map(_joins, items))) and joined < expected()):
        if any(map(_urgent, new)):
            break
        if any(map(_joins, new)):
            until = min(clock() + GATHER_S, begun + LONGEST_GATHER_S)
        elif _submitted(new):
            until = min(clock() + SUBMITTED_S, begun + 4 * SUBMITTED_S)
        left = until - clock()
        if left <= 0:
            break
        new = list(control.receive(left))
        items = [*items, *new]
    return items


def _submitted(items: Sequence[Any]) -> bool:
    return any(isinstance(item, TrainerRecord) for item in items)


def _joins(item: Any) -> bool:
    return isinstance(item, GreetingReturned) and item.done.exception() is None


def _urgent(item: Any) -> bool:
    """Whether this must not wait for other nodes."""
    return isinstance(item, (CancelTrainer, Quiesce, Stop)) or (
        isinstance(item, FromMember) and isinstance(item.message, Notice)
    )


class OfferChanges:
    """What a site offers against what it said before; stale after ``stale_s`` seconds."""

    def __init__(self, stale_s: float) -> None:
        self._stale_s = stale_s
        self._newest: dict[str, NodeOffer] = {}  # of each node
        self._told: dict[str, NodeOffer] = {}

    def new(
        self, offers: Sequence[NodeOffer], now: float, *, last: bool = False
    ) -> tuple[NodeOffer, ...]:
        """Offers that have begun, without an end, or ended (``last``: all of them end here)."""
        over_at = max([now - self._stale_s, *(offer.end for offer in offers)])
        found: dict[tuple[str, float], NodeOffer] = {}
        for offer in sorted(offers, key=lambda offer: (offer.node, offer.start)):
            before = self._newest.get(offer.node)
            if before is not None and offer.start <= before.end:  # it goes on, or is an older one
                offer = NodeOffer(offer.node, before.start, max(before.end, offer.end))
            self._newest[offer.node] = offer
            if not last and offer.end >= over_at:
                offer = NodeOffer(offer.node, offer.start, math.inf)
            if self._told.get(offer.node) != offer:
                self._told[offer.node] = found[offer.node, offer.start] = offer
        return tuple(found.values())
