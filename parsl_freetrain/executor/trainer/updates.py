"""Keeps every :class:`~parsl_freetrain.executor.trainer.future.TrainingFuture` up to date."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor import notices as no
from parsl_freetrain.executor.trainer.future import TrainingFuture


@dataclass
class _Open:
    """A trainer that has not ended."""

    future: TrainingFuture
    checkpoint: Checkpoint
    last_nodes: int = 0
    failure: BaseException | None = None  # the last exception of the user's code

    def show(self, state: str | None = None, **changes: Any) -> None:
        if state:
            self.future.state = state
        self.future._progress = replace(self.future._progress, **changes)

    def has(self, checkpoint: Checkpoint) -> None:
        if checkpoint.path:
            self.checkpoint = self.future.checkpoint = checkpoint


class FutureUpdater:
    """A subscriber that updates the futures' progress and settles the futures."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}

    def flush(self) -> None:
        """Nothing is ever pending."""

    def take(self, notice: no.Notice) -> None:
        """Handle one notice."""
        match notice:
            case no.TrainerAccepted(record=record):
                trainer, checkpoint = record.trainer, record.checkpoint
                self._open[trainer.name] = accepted = _Open(record.future, checkpoint)
                accepted.has(checkpoint)
                accepted.show(
                    'queued', samples=checkpoint.samples, total_samples=trainer.total_samples
                )
            case no.Handled(events=events, reply=reply):
                self._handled(events, reply.actions)
            case no.TrainerInterrupted(trainer=trainer, why=why):
                self._settle(trainer, 'failed', TrainerFailed(why))
            case (
                no.FragmentLaunched()
                | no.MetricsReported()
                | no.FragmentConcluded()
                | no.CheckpointWritten()
            ):
                self._progressed(notice)

    def _handled(self, events: tuple[ev.Event, ...], actions: tuple[ev.Action, ...]) -> None:
        for event in events:
            match event:
                case ev.TotalKnown(trainer=name) if name in self._open:
                    self._open[name].show(total_samples=event.total_samples)
                case ev.TrainerAborted(trainer=name) if name in self._open:
                    self._open[name].failure = None  # the trainer survived that one
        for action in actions:
            if isinstance(action, ev.EndTrainer):
                error = TrainerFailed(f'Trainer {action.trainer!r} failed: {action.why}.')
                self._settle(action.trainer, action.state, error)

    def _progressed(
        self,
        notice: no.FragmentLaunched
        | no.MetricsReported
        | no.FragmentConcluded
        | no.CheckpointWritten,
    ) -> None:
        name = (
            notice.checkpoint.trainer
            if isinstance(notice, no.CheckpointWritten)
            else notice.trainer
        )
        trainer = self._open.get(name)
        if trainer is None:
            return
        progress = trainer.future.progress()
        match notice:
            case no.FragmentLaunched(task=task) if task is not None:
                nodes = len(notice.nodes)
                rescaled = progress.rescaled + (trainer.last_nodes not in (0, nodes))
                trainer.last_nodes = nodes
                trainer.future.checkpoints.append(task)
                trainer.show(
                    'running', nodes=nodes, fragments=progress.fragments + 1, rescaled=rescaled
                )
            case no.MetricsReported(samples=samples, metrics=metrics):
                trainer.show(samples=samples, metrics={**progress.metrics, **metrics})
                trainer.future._progressed(samples, metrics)
            case no.CheckpointWritten(checkpoint=checkpoint):
                trainer.has(checkpoint)
            case no.FragmentConcluded(result=result):
                trainer.has(result.checkpoint)
                trainer.failure = result.exception or trainer.failure
                trainer.show(
                    'queued',
                    nodes=0,
                    preempted=progress.preempted + (result.ending is ev.Ending.PREEMPTED),
                    samples=result.checkpoint.samples,
                    metrics={**progress.metrics, **result.checkpoint.metrics},
                )

    def _settle(self, name: str, state: str, error: TrainerFailed) -> None:
        """Settle the future of a trainer that has ended."""
        trainer = self._open.pop(name, None)
        if trainer is None or trainer.future.done():
            return
        if state == 'cancelled':
            trainer.future._settle_cancelled()
        elif state == 'failed':
            trainer.future._settle_failed(trainer.failure or error)
        else:
            trainer.future.state = state
            trainer.future.set_result(trainer.checkpoint)
