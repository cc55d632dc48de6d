"""Commands to the event loop from other threads, by :meth:`EventLoop.post`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.block.adoption import AdoptedBlock
from parsl_freetrain.executor.block.blocks import GreetingReturned
from parsl_freetrain.executor.fragment.runner import MemberReturned
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord


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
class SchedulerAnswered:
    """The scheduler has answered; the blocks can be polled."""


@dataclass(frozen=True)
class OrdinaryTasks:
    change: int


@dataclass(frozen=True)
class Quiesce:
    """Stop every fragment with a checkpoint; ``quiet`` is set when the last one has ended."""

    quiet: threading.Event


@dataclass(frozen=True)
class Stop:
    """End the event loop."""


_Answer = TaskArrived | MemberReturned | GreetingReturned | SchedulerAnswered
Command = SubmitTrainer | CancelTrainer | AdoptBlock | OrdinaryTasks | Quiesce | Stop | _Answer
