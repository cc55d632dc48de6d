"""Subscribers that show how far trainers are: in their futures, and in a line on a terminal."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.errors import TrainerFailed, nodes_text
from parsl_freetrain.executor import off_loop
from parsl_freetrain.executor.fragment.trainer_record import TellReplica, TrainerRecord
from parsl_freetrain.executor.stream import Subscriber
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.journal.kept_metrics import main_metric
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore

EVERY_S = 0.5
MOST_TRAINERS = 3
_CLEAR = '\r\x1b[K'


class FutureUpdater(Subscriber):
    def __init__(self, records: Mapping[str, TrainerRecord]) -> None:
        self._records = records
        self._nodes: dict[str, int] = {}  # of the last fragment of each trainer

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.Decided(actions=actions):
                for action in actions:
                    if isinstance(action, ev.EndTrainer):
                        error = TrainerFailed(f'Trainer {action.trainer!r} failed: {action.why}.')
                        self._settle(action.trainer, action.state, error)
            case ev.TrainerInterrupted(trainer=name, why=why):
                self._settle(name, 'failed', TrainerFailed(why))
            case ev.TrainerSubmitted(trainer=trainer):
                self._changed(trainer.name, event)
            case ev.CheckpointSaved(checkpoint=checkpoint):
                self._changed(checkpoint.trainer, event)
            case _ if isinstance(named := getattr(event, 'trainer', None), str):
                self._changed(named, event)

    def _of_training(self, record: TrainerRecord) -> list[TrainerRecord]:
        """A trainer's record, and those of the other replicas of its training."""
        training = record.trainer.training
        others = [one for one in self._records.values() if one.trainer.training == training]
        return [record, *(others if training else ())]

    def _open(self, name: str) -> TrainerRecord | None:
        record = self._records.get(name)
        return None if record is None or record.future._ended else record

    def _changed(self, name: str, event: ev.Event) -> None:
        if (record := self._open(name)) is None:
            return
        progress = record.future._progress
        match event:
            case ev.TrainerSubmitted(trainer=trainer, samples=samples):
                _show(record, 'queued', samples=samples, total_samples=trainer.total_samples)
            case ev.TotalKnown(total_samples=total_samples):
                _show(record, total_samples=total_samples)
            case ev.TrainerAborted():
                for one in self._of_training(record):
                    one.failure = None  # the trainers survived those
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
                _show(record)
            case ev.FragmentEnded(ending=ending):
                _show(
                    record,
                    'queued',
                    nodes=0,
                    preempted=progress.preempted + (ending is ev.Ending.PREEMPTED),
                    samples=record.checkpoint.samples,
                    metrics={**progress.metrics, **record.checkpoint.metrics},
                )

    def _settle(self, name: str, state: str, error: TrainerFailed) -> None:
        if (record := self._open(name)) is None:
            return
        if state == 'cancelled':
            record.future._settle_cancelled()
        elif state == 'failed':
            known = (one.failure for one in self._of_training(record) if one.failure)
            record.future._settle_failed(next(known, error))
        else:
            store = PosixCheckpointStore(Path(record.store), name)
            keep = record.spec.checkpoints.retention
            record.future._settle_finished(
                record.checkpoint, lambda: keep.best_of(store.checkpoints())
            )


def _show(record: TrainerRecord, state: str | None = None, **changes: Any) -> None:
    if state:
        record.future.state = state
    if record.checkpoint.path:
        record.future.checkpoint = record.checkpoint
    record.future._progress = replace(record.future._progress, **changes)


class ProgressLine:
    """A subscriber that keeps one line about trainers, if ``out`` is a terminal."""

    def __init__(
        self,
        out: TextIO | None,
        records: Mapping[str, TrainerRecord],
        ledger: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out = out
        self._on = out is not None and out.isatty()
        self._writing = False
        self._records, self._ledger = records, ledger
        self._clock = clock
        self._futures: list[TrainingFuture] = []
        self._shown_at = -EVERY_S

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.TrainerSubmitted(trainer=trainer) if record := self._records.get(trainer.name):
                if trainer.training not in ('', trainer.name):
                    return  # the first replica's future shows them all
                if self._on and not self._futures:
                    self._write(f'freetrain watch --ledger {self._ledger} shows more.\n')
                self._futures.append(record.future)
            case ev.RunEnded() if self._on and self._futures:
                self._write(_CLEAR + self._line() + '\n')
                self._on = False

    def flush(self) -> None:
        """Show the line, unless that was done a moment ago or still goes on."""
        late = self._on and self._futures and self._clock() - self._shown_at >= EVERY_S
        if late and not self._writing:
            self._shown_at = self._clock()
            self._write(_CLEAR + self._line())

    def _write(self, text: str) -> None:
        """Write where nobody waits: a terminal can be stopped."""

        def write() -> None:
            assert self._out is not None
            try:
                self._out.write(text)
                self._out.flush()
            except (OSError, ValueError):  # it is gone
                self._on = False
            self._writing = False

        self._writing = True  # before, since it may end at once
        if not off_loop.run(write):
            self._writing = False

    def _line(self) -> str:
        ended = [future for future in self._futures if future._ended]
        going = [future for future in self._futures if not future._ended]
        parts = [_progress_of(future) for future in going[:MOST_TRAINERS]]
        if len(going) > MOST_TRAINERS:
            parts.append(f'{len(going) - MOST_TRAINERS} more')
        if ended:
            states = sorted({future.state for future in ended})
            counts = (f'{sum(f.state == state for f in ended)} {state}' for state in states)
            parts.append(', '.join(counts))
        return '; '.join(parts)[: shutil.get_terminal_size().columns - 1]


def _progress_of(future: TrainingFuture) -> str:
    progress = future.progress()
    total = f' of {progress.total_samples:,}' if progress.total_samples else ''
    nodes = f' on {nodes_text(progress.nodes)}' if progress.nodes else ''
    name = main_metric(progress.metrics)
    loss = f', {name} {progress.metrics[name]:.4g}' if name else ''
    return f'{future.name} {future.state}{nodes}: {progress.samples:,}{total} samples{loss}'


class ReplicasElsewhere(Subscriber):
    """Tells other executors how far the replicas of their trainings are here."""

    def __init__(self, records: Mapping[str, TrainerRecord]) -> None:
        self._records = records

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.TrainerSubmitted(trainer=trainer, samples=samples):
                self._tell(trainer.name, samples)
            case ev.FragmentEnded(trainer=name, samples=samples):
                self._tell(name, samples)
            case ev.Decided(actions=actions):
                for action in actions:
                    if isinstance(action, ev.EndTrainer):
                        self._tell(action.trainer, None, action.state, action.why)

    def _tell(self, name: str, samples: int | None, ending: str = '', why: str = '') -> None:
        record = self._records.get(name)
        if record is not None and record.tell_others is not None:
            record.tell_others(TellReplica(record.trainer.training, name, samples, ending, why))
