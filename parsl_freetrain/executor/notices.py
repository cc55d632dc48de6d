"""The stream of all events of a run, and its subscribers.

Emitters (blocks, fragments, requests, the event loop itself) emit two kinds of items. Core events
(:mod:`parsl_freetrain.core.model.events`) are kept until the event loop gives them to the
controller in one batch. Notices do not concern the controller and are published at once.
Subscribers see both: notices, and each batch as a :class:`Handled`, which includes the controller's
reply.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from parsl_freetrain.core.controller.controller_state import Reply
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import BlockRequest, Checkpoint
from parsl_freetrain.executor.fragment.fragment_state import FragmentResult
from parsl_freetrain.executor.trainer.trainer_record import TrainerRecord
from parsl_freetrain.sites.protocols import NodeOffer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notice:
    """Something that happened; ``at``: seconds since the epoch."""

    at: float


@dataclass(frozen=True)
class Handled(Notice):
    """The controller has handled a batch; its actions are carried out next."""

    events: tuple[ev.Event, ...]
    reply: Reply


@dataclass(frozen=True)
class BlockSubmitted(Notice):
    """A block was submitted, or adopted from an earlier run."""

    block: str
    job_id: str
    request: BlockRequest


@dataclass(frozen=True)
class BlockRefused(Notice):
    """The site refused a block; the next one is submitted ``next_try_s`` seconds later."""

    nodes: int
    next_try_s: float
    error: str


OUT_OF_MEMORY = 'out of memory'


@dataclass(frozen=True)
class BlockGone(Notice):
    """A block has ended: 'taken', 'expired', 'returned', 'cancelled' or :data:`OUT_OF_MEMORY`."""

    block: str
    how: str


@dataclass(frozen=True)
class NodeReady(Notice):
    """A node can run fragments; ``name`` is its host name, ``node`` is unique within the run,
    ``devices`` the number of its accelerators.
    """

    block: str
    node: str
    name: str
    devices: int = 0


@dataclass(frozen=True)
class NodeUnusable(Notice):
    """A node's first task failed."""

    block: str
    node: str
    error: str


@dataclass(frozen=True)
class NodeGone(Notice):
    """A node is gone: 'lost' while its block continues, or with the end of its block."""

    node: str
    how: str


@dataclass(frozen=True)
class TrainerAccepted(Notice):
    """A trainer was submitted and waits for nodes."""

    record: TrainerRecord


@dataclass(frozen=True)
class TrainerInterrupted(Notice):
    """The run ends before the trainer; ``why`` is a sentence that says how to continue."""

    trainer: str
    why: str


@dataclass(frozen=True)
class FragmentLaunched(Notice):
    """A fragment was submitted to Parsl; ``task`` is None if that failed."""

    trainer: str
    fragment: int
    nodes: tuple[str, ...]
    deadline_s: float | None
    samples: int
    task: Future[Checkpoint] | None

    @property
    def task_id(self) -> int | None:
        """Parsl's id of the task."""
        record = getattr(self.task, 'task_record', None)
        return None if record is None else record['id']


@dataclass(frozen=True)
class FragmentStarted(Notice):
    """A fragment has begun its first training step."""

    trainer: str
    fragment: int
    samples: int


@dataclass(frozen=True)
class MetricsReported(Notice):
    """A fragment's progress in samples and samples per second, and its last reported metrics."""

    trainer: str
    fragment: int
    samples: int
    rate: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointWritten(Notice):
    """A checkpoint was committed. Writing it took ``seconds``; training was paused for
    ``pause_s``.
    """

    checkpoint: Checkpoint
    seconds: float
    pause_s: float


@dataclass(frozen=True)
class FragmentConcluded(Notice):
    """All members of a fragment have ended. ``kept``: the number of samples from which the next
    fragment can go on, by the checkpoint or in memory; ``reached``: the largest number trained.
    """

    trainer: str
    fragment: int
    result: FragmentResult
    kept: int
    reached: int


@dataclass(frozen=True)
class OffersSeen(Notice):
    """The nodes that the site has offered between the previous notice of this kind and ``at``."""

    offers: tuple[NodeOffer, ...]


@dataclass(frozen=True)
class RunEnded(Notice):
    """The run has ended: 'shutdown', or 'error' if the event loop broke down. Nothing follows."""

    how: str


class Subscriber(Protocol):
    """Follows the events of a run. Only the event loop's thread calls it."""

    def take(self, notice: Notice) -> None:
        """Handle one notice; ignore those of no interest."""
        ...

    def flush(self) -> None:
        """Write down what is pending, since no more notices are known now."""
        ...


class Stream:
    """Publishes notices, and keeps events for the controller in order."""

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self.subscribers = list(subscribers)
        self._events: list[ev.Event] = []

    def emit(self, *items: ev.Event | Notice) -> None:
        """Publish notices at once; keep events for the next batch."""
        for item in items:
            if isinstance(item, Notice):
                self._publish(item)
            else:
                self._events.append(item)

    def next_batch(self) -> tuple[ev.Event, ...]:
        """The events emitted since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def flush(self) -> None:
        """Have every subscriber write down what is pending."""
        for subscriber in self.subscribers:
            try:
                subscriber.flush()
            except Exception:
                logger.exception('%s could not write', type(subscriber).__name__)

    def _publish(self, notice: Notice) -> None:
        for subscriber in self.subscribers:
            try:
                subscriber.take(notice)
            except BaseException:  # callbacks of users' futures run here and may raise anything
                logger.exception('%s could not take in %s', type(subscriber).__name__, notice)
