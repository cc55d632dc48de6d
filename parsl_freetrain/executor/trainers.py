"""What the executor keeps of each trainer beside the controller's view: its future, its orders, and how to submit its fragments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.core.events import Ending
from parsl_freetrain.core.words import Checkpoint, Shape, Trainer
from parsl_freetrain.executor.future import TrainingFuture
from parsl_freetrain.executor.gang import Gang, Verdict
from parsl_freetrain.training.fragment import Handover
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled

Launch = Callable[[Mapping[str, Any], 'Future[Checkpoint] | Checkpoint'], 'Future[Checkpoint]']


@dataclass(frozen=True)
class Terms:
    """How a trainer's fragments train; see :class:`parsl_freetrain.training.fragment.FragmentOrder`. ``shapes`` is by node count."""

    store: str
    total_samples: int | None
    total_epochs: float | None
    mode: str
    shards: int
    seed: int
    checkpoint_every_s: float
    keep_checkpoints: Retention
    ranks_per_node: int
    scaled: Scaled
    on_nan: str
    shapes: Mapping[int, Shape] = field(default_factory=dict)
    threads_per_rank: int = 1


@dataclass
class TrainerRecord:
    """One trainer of this run.

    Attributes
    ----------
    launch
        Submits a fragment: takes the resource specification and the checkpoint to start from, returns its checkpoint future.
    checkpoint
        The newest committed checkpoint.
    """

    trainer: Trainer
    terms: Terms
    launch: Launch
    future: TrainingFuture
    checkpoint: Checkpoint
    fragments_before: int = 0
    last_nodes: int = 0
    task: Future[Checkpoint] | None = None
    last_good: Future[Checkpoint] | None = None
    failure: BaseException | None = None
    left: tuple[str, Handover] | None = None        # a node, and the state that the last fragment has left in its memory
    paused: tuple[int, float] | None = None         # for a rescale: its nodes before, and when its last step ended

    def _show(self, state: str | None = None, **changes: Any) -> None:
        if state:
            self.future.state = state
        self.future._progress = replace(self.future._progress, **changes)

    def queued(self) -> None:
        self.future.checkpoint = self.checkpoint if self.checkpoint.path else None
        self._show('queued', samples=self.checkpoint.samples, total_samples=self.trainer.total_samples)

    def total_known(self, total_samples: int) -> None:
        self.trainer = replace(self.trainer, total_samples=total_samples)
        self._show(total_samples=total_samples)

    def fragment_started(self, nodes: int, task: Future[Checkpoint]) -> None:
        progress = self.future.progress()
        rescaled = progress.rescaled + (self.last_nodes not in (0, nodes))
        self.last_nodes = nodes
        self.task = task
        self.future.checkpoints.append(task)
        self._show('running', nodes=nodes, fragments=progress.fragments + 1, rescaled=rescaled)

    def progressed(self, samples: int, metrics: Mapping[str, float]) -> None:
        self._show(samples=samples, metrics={**self.future.progress().metrics, **metrics})
        self.future._progressed(samples, metrics)

    def checkpointed(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = self.future.checkpoint = checkpoint

    def fragment_ended(self, gang: Gang, verdict: Verdict) -> None:
        if verdict.checkpoint.path:
            self.checkpointed(verdict.checkpoint)
        if verdict.ending in (Ending.STOPPED, Ending.FINISHED, Ending.PREEMPTED):
            self.last_good = self.task
        if verdict.exception is not None:
            self.failure = verdict.exception
        preempted = self.future.progress().preempted + (verdict.ending is Ending.PREEMPTED)
        self._show('queued', nodes=0, preempted=preempted, samples=verdict.checkpoint.samples,
                   metrics={**self.future.progress().metrics, **verdict.checkpoint.metrics})

    def pause(self, gang: Gang, verdict: Verdict) -> None:
        """A fragment has ended: what the next one can go on with at once, and since when nothing is trained."""
        self.left, stepped_at = gang.handover(verdict), float(gang.last_word().get('stepped_at', 0.0))
        self.paused = (len(gang.members), stepped_at) if gang.goes_on and verdict.ending is Ending.STOPPED and stepped_at else None

    def resume(self, nodes: tuple[str, ...]) -> tuple[tuple[str, ...], Handover | None]:
        """A fragment starts on these nodes: which of them has rank 0, and so on, and the state that is in its memory."""
        left, self.left = self.left, None
        if left is None or left[0] not in nodes:
            return nodes, None
        return (left[0], *(node for node in nodes if node != left[0])), left[1]

    def settle(self, state: str, error: BaseException | None = None) -> None:
        """The trainer is over; whoever waits for its future learns so."""
        if self.future.done():
            return
        self.future.state = state
        if state == 'cancelled':
            self.future._settle_cancelled()
        elif error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.checkpoint)


class TrainerNames:
    """The names of one run's trainers, each given once; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def take(self, name: str, *, explicit: bool) -> str:
        """A name that no trainer of this run has: ``name``, or ``name-2`` and so on where it was not ``explicit``.

        Raises
        ------
        BadInput
            If an explicit name is taken.
        """
        with self._lock:
            if explicit and name in self._taken:
                raise BadInput(f'There is a trainer {name!r} already in this run; give each call another trainer_name.')
            free, number = name, 1
            while free in self._taken:
                number += 1
                free = f'{name}-{number}'
            self._taken.add(free)
        return free

    def free(self, name: str) -> None:
        """The trainer of this name was refused after all."""
        with self._lock:
            self._taken.discard(name)
