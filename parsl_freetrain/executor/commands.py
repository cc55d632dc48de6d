"""Commands to the event loop from other threads, by :meth:`EventLoop.post`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.fragment.worker_tasks import Greeting
from parsl_freetrain.executor.trainer.trainer_record import TrainerRecord


@dataclass(frozen=True)
class SubmitTrainer:
    record: TrainerRecord


@dataclass(frozen=True)
class CancelTrainer:
    trainer: str


@dataclass(frozen=True)
class AdoptBlock:
    block: AdoptedBlock


@dataclass(frozen=True)
class TaskArrived:
    """Parsl has passed on a fragment's task; ``outer`` is the future that Parsl waits for."""

    context: Mapping[str, Any]
    buffer: bytes
    outer: Future[Checkpoint]


@dataclass(frozen=True)
class MemberReturned:
    """The task of a fragment's member has returned."""

    trainer: str
    fragment: int
    member: int
    done: Future[Any]


@dataclass(frozen=True)
class GreetingReturned:
    """A node's first task has returned."""

    block: str
    manager: str
    done: Future[Greeting]


@dataclass(frozen=True)
class SchedulerAnswered:
    """The scheduler has answered; the blocks can be polled."""


@dataclass(frozen=True)
class OrdinaryTasks:
    """The number of ordinary Parsl tasks that wait or run has changed."""

    change: int


@dataclass(frozen=True)
class Quiesce:
    """Stop every fragment with a checkpoint; ``quiet`` is set when the last one has ended."""

    quiet: threading.Event


@dataclass(frozen=True)
class Stop:
    """End the event loop."""


Command = (
    SubmitTrainer
    | CancelTrainer
    | AdoptBlock
    | TaskArrived
    | MemberReturned
    | GreetingReturned
    | SchedulerAnswered
    | OrdinaryTasks
    | Quiesce
    | Stop
)


class CommandInbox(Protocol):
    """Takes commands from any thread."""

    def post(self, item: Command) -> None: ...
