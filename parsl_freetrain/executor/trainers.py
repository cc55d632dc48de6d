"""What the executor keeps of each trainer beside the controller's view: its future, its orders, and how to submit its fragments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from parsl_freetrain.core.events import Ending
from parsl_freetrain.core.words import Checkpoint, Trainer
from parsl_freetrain.executor.future import TrainingFuture
from parsl_freetrain.executor.gang import Gang, Verdict
from parsl_freetrain.training.retention import Retention
from parsl_freetrain.training.scaled import Scaled

Launch = Callable[[Mapping[str, Any], 'Future[Checkpoint] | Checkpoint'], 'Future[Checkpoint]']


@dataclass(frozen=True)
class Terms:
    """How a trainer's fragments train; see :class:`parsl_freetrain.training.fragment.FragmentOrder`."""

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
