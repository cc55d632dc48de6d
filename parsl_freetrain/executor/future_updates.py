"""Keeps every :class:`~parsl_freetrain.executor.trainer.future.TrainingFuture` up to date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import TrainerFailed
from parsl_freetrain.executor.fragment.trainer_record import TrainerRecord
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore


class FutureUpdater:
    """A subscriber that updates the progress of all trainers' futures and settles them."""

    def __init__(self, records: Mapping[str, TrainerRecord]) -> None:
        self._records = records
        self._nodes: dict[str, int] = {}  # of the last fragment of each trainer

    def flush(self) -> None:
        """Nothing is ever pending."""

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.TrainerSubmitted(trainer=trainer):
                self._accepted(trainer.name, event.samples, trainer.total_samples)
            case ev.Decided(actions=actions):
                for action in actions:
                    if isinstance(action, ev.EndTrainer):
                        error = TrainerFailed(f'Trainer {action.trainer!r} failed: {action.why}.')
                        self._settle(action.trainer, action.state, error)
            case ev.TrainerInterrupted(trainer=name, why=why):
                self._settle(name, 'failed', TrainerFailed(why))
            case ev.CheckpointSaved(checkpoint=checkpoint):
                self._progressed(checkpoint.trainer, event)
            case (
                ev.TotalKnown(trainer=name)
                | ev.TrainerAborted(trainer=name)
                | ev.FragmentLaunched(trainer=name)
                | ev.FragmentProgressed(trainer=name)
                | ev.FragmentEnded(trainer=name)
            ):
                self._progressed(name, event)

    def _open(self, name: str) -> TrainerRecord | None:
        record = self._records.get(name)
        return None if record is None or record.future._ended else record

    def _accepted(self, name: str, samples: int, total_samples: int | None) -> None:
        if record := self._open(name):
            _has_checkpoint(record)
            _show(record, 'queued', samples=samples, total_samples=total_samples)

    def _progressed(self, name: str, event: ev.Event) -> None:
        record = self._open(name)
        if record is None:
            return
        progress = record.future.progress()
        match event:
            case ev.TotalKnown(total_samples=total_samples):
                _show(record, total_samples=total_samples)
            case ev.TrainerAborted():
                record.failure = None  # the trainer survived that one
            case ev.FragmentLaunched(failed=False) if record.task is not None:
                nodes = len(event.nodes)
                rescaled = progress.rescaled + (self._nodes.get(name, nodes) != nodes)
                self._nodes[name] = nodes
                record.future.checkpoints.append(record.task)
                fragments = progress.fragments + 1
                _show(record, 'running', nodes=nodes, fragments=fragments, rescaled=rescaled)
            case ev.FragmentProgressed(samples=samples, metrics=metrics):
                _show(record, samples=samples, metrics={**progress.metrics, **metrics})
            case ev.CheckpointSaved():
                _has_checkpoint(record)
            case ev.FragmentEnded(ending=ending):
                _has_checkpoint(record)
                _show(
                    record,
                    'queued',
                    nodes=0,
                    preempted=progress.preempted + (ending is ev.Ending.PREEMPTED),
                    samples=record.checkpoint.samples,
                    metrics={**progress.metrics, **record.checkpoint.metrics},
                )

    def _settle(self, name: str, state: str, error: TrainerFailed) -> None:
        """Settle the future of a trainer that has ended."""
        record = self._open(name)
        if record is None:
            return
        if state == 'cancelled':
            record.future._settle_cancelled()
        elif state == 'failed':
            record.future._settle_failed(record.failure or error)
        else:
            store = PosixCheckpointStore(Path(record.store), name)
            keep = record.spec.checkpoints.retention
            record.future._settle_finished(
                record.checkpoint, lambda: keep.best_of(store.checkpoints())
            )


def _show(record: TrainerRecord, state: str | None = None, **changes: Any) -> None:
    if state:
        record.future.state = state
    record.future._progress = replace(record.future._progress, **changes)


def _has_checkpoint(record: TrainerRecord) -> None:
    if record.checkpoint.path:
        record.future.checkpoint = record.checkpoint
