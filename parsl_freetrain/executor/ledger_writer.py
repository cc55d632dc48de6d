"""Writes the ledger: the record of a run that outlives the run's process."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import Trainer
from parsl_freetrain.executor.trainer.trainer_record import TrainerRecord
from parsl_freetrain.ledger.writer import Ledger
from parsl_freetrain.training.spec.shapes import Shapes

# These arrive many times a minute and mean little by themselves; progress has its own table.
UNRECORDED = (ev.Tick, ev.HolesSeen, ev.FragmentProgressed)


def about_this_process(checkpoint_dir: str) -> dict[str, Any]:
    """The user, host and process of a run. Others need them to tell whether the run is alive, and
    to resume it.
    """
    return {
        'host': platform.node(),
        'pid': os.getpid(),
        'started': psutil.Process().create_time(),
        'folder': os.getcwd(),
        'checkpoint_dir': str(Path(checkpoint_dir).absolute()),
    }


class LedgerWriter:
    """A subscriber that writes events into the ledger of a run that has begun. ``run``: Parsl's id
    of the run, as in :meth:`Ledger.begin_run`.
    """

    def __init__(self, ledger: Ledger, run: str, records: Mapping[str, TrainerRecord]) -> None:
        self._ledger = ledger
        self._run = run
        self._records = records
        self._shapes: dict[str, Mapping[int, Shapes]] = {}  # of trainers that have shapes
        self._over: set[str] = set()  # trainers that have ended; their state is final
        self._batch: list[ev.Event] = []
        self._nodes: dict[str, str] = {}

    def flush(self) -> None:
        """Commit pending rows."""
        self._ledger.commit()

    def take(self, event: ev.Event) -> None:
        """Record one event."""
        if not isinstance(event, ev.NOTES):
            self._batch.append(event)
        match event:
            case ev.Decided():
                self._handled(event)
            case ev.TrainerSubmitted():
                if record := self._records.get(event.trainer.name):
                    self._trainer(record, event.at)
                else:
                    self._ledger.trainers.submitted(
                        name=event.trainer.name,
                        at=event.at,
                        spec={},
                        total_samples=event.trainer.total_samples,
                        samples=event.samples,
                    )
            case ev.TrainerInterrupted(trainer=trainer):
                self._state(trainer, 'interrupted', event.at)
                self._over.add(trainer)
            case ev.OffersSeen(offers=offers):
                self._ledger.nodes.offered((o.node, o.start, o.end) for o in offers)
                self._ledger.alive(event.at)
            case ev.RunEnded(how=how):
                self._ledger.end_run(self._run, at=event.at, how=how)
                self._ledger.close()
            case _:
                self._block_or_node(event)
                self._fragment(event)

    def _handled(self, decided: ev.Decided) -> None:
        self._ledger.decisions.batch(decided.at, self._batch)
        for event in self._batch:
            self._event(event)
            match event:
                case ev.BlockEndKnown(block=block, until_s=until_s):
                    self._ledger.nodes.block_until(block, until=until_s)
                case ev.TotalKnown(trainer=trainer, total_samples=total_samples):
                    self._ledger.trainers.total(trainer, total_samples)
                case ev.FragmentEnded():
                    names = ('start_s', 'step_s', 'checkpoint_s', 'memory')
                    self._ledger.event(
                        at=event.at,
                        kind='FragmentTimed',
                        trainer=event.trainer,
                        fragment=event.fragment,
                        detail={name: getattr(event, name) for name in names},
                    )
        self._batch.clear()
        if decided.trigger:
            self._decision(decided)
        for action in decided.actions:
            match action:
                case ev.EndTrainer():
                    self._state(action.trainer, action.state, decided.at, action.why)
                    self._over.add(action.trainer)
                case ev.StartFragment() if shapes := self._shapes.get(action.trainer):
                    self._ledger.event(
                        at=decided.at,
                        kind='ShapeUsed',
                        trainer=action.trainer,
                        fragment=action.fragment,
                        detail={'shape': str(shapes[len(action.nodes)][action.shape])},
                    )

    def _event(self, event: ev.Event) -> None:
        """Write a row for an event that may matter to an explanation."""
        if isinstance(event, UNRECORDED):
            return
        detail = {name: getattr(event, name) for name in event.__struct_fields__}
        known = {key: detail.pop(key, None) for key in ('trainer', 'fragment', 'block')}
        if isinstance(known['trainer'], Trainer):
            known['trainer'] = known['trainer'].name
        del detail['at']
        self._ledger.event(
            at=event.at,
            kind=type(event).__name__,
            detail=json.loads(json.dumps(detail, default=_plain)),
            **known,
        )

    def _decision(self, decided: ev.Decided) -> None:
        """Write what a decision was based on, the decision, and its expected gain."""
        self._ledger.decisions.decision(
            at=decided.at,
            trigger=decided.trigger,
            nodes=decided.nodes,
            status=decided.status,
            solver=decided.solver,
            objective=decided.objective,
            seconds=decided.seconds,
            bound=decided.bound,
            staying=decided.staying,
            current=decided.current,
            allocation=decided.allocation,
            actions=decided.actions,
        )
        if (document := decided.document) is not None:
            self._ledger.decisions.problem(document)

    def _trainer(self, record: TrainerRecord, at: float) -> None:
        trainer, training = record.trainer, record.spec
        spec: dict[str, Any] = {
            'min_nodes': trainer.counts()[0],
            'max_nodes': trainer.counts()[-1],
            'mode': str(training.mode),
            'rescale_up_s': trainer.rescale_up_s,
            'rescale_down_s': trainer.rescale_down_s,
            'stated_costs': list(trainer.stated_costs),
        }
        if training.total_epochs is not None:
            spec['total_epochs'] = training.total_epochs
        if trainer.sizes:
            spec['sizes'] = list(trainer.sizes)
        if training.shapes:
            spec['shapes'] = {
                str(nodes): list(map(str, shapes)) for nodes, shapes in training.shapes.items()
            }
            self._shapes[trainer.name] = training.shapes
        if trainer.curve:
            spec['curve'] = {'nodes': list(trainer.curve.nodes), 'rate': list(trainer.curve.rate)}
        if trainer.class_curves:
            spec['classes'] = [name for name, _ in trainer.class_curves]
        self._ledger.trainers.submitted(
            name=trainer.name,
            at=at,
            total_samples=trainer.total_samples,
            samples=record.checkpoint.samples,
            spec=spec,
        )

    def _state(self, trainer: str, state: str, at: float, why: str = '') -> None:
        if trainer not in self._over:
            self._ledger.trainers.state(trainer, at=at, state=state, why=why)

    def _block_or_node(self, event: ev.Event) -> None:
        at = event.at
        match event:
            case ev.BlockOpened(block=block, job_id=job_id, request=request):
                self._ledger.nodes.block_opened(
                    block,
                    at=at,
                    job_id=job_id,
                    nodes=request.nodes,
                    walltime_s=request.walltime_s,
                    names=request.names,
                    node_class=request.node_class,
                )
            case ev.BlockRefused(nodes=nodes, next_try_s=next_try_s, error=error):
                detail = {'nodes': nodes, 'next_try_s': next_try_s, 'error': error}
                self._ledger.event(at=at, kind='BlockRefused', detail=detail)
            case ev.BlockClosed(block=block, how=how):
                self._ledger.nodes.block_closed(block, at=at, how=how)
            case ev.NodesJoined(block=block, nodes=nodes, hosts=hosts):
                for node, name in zip(nodes, hosts or nodes, strict=True):
                    self._ledger.nodes.joined(node, at=at, block=block, name=name)
            case ev.NodeUnusable(block=block, node=node, error=error):
                self._ledger.event(
                    at=at, kind='NodeUnusable', block=block, node=node, detail={'error': error}
                )
            case ev.NodesLeft(nodes=nodes, how=how):
                for node in nodes:
                    self._ledger.nodes.left(node, at=at, how=how)

    def _fragment(self, event: ev.Event) -> None:
        at = event.at
        match event:
            case ev.FragmentLaunched(trainer=trainer, fragment=fragment):
                self._ledger.trainers.fragment_decided(
                    trainer,
                    fragment,
                    at=at,
                    task_id=event.task,
                    nodes=event.nodes,
                    deadline=event.deadline_s,
                    from_samples=event.samples,
                )
                if not event.failed:
                    self._state(trainer, 'running', at)
            case ev.FragmentStarted(trainer=trainer, fragment=fragment, samples=samples):
                self._ledger.trainers.fragment_started(trainer, fragment, at=at, samples=samples)
            case ev.FragmentProgressed(trainer=trainer, fragment=fragment):
                self._ledger.trainers.fragment_progress(
                    trainer,
                    fragment,
                    at=at,
                    samples=event.samples,
                    rate=event.rate,
                    metrics=event.metrics,
                )
            case ev.CheckpointSaved(checkpoint=checkpoint):
                self._ledger.trainers.checkpoint(
                    checkpoint.trainer,
                    checkpoint.fragment,
                    at=at,
                    samples=checkpoint.samples,
                    path=checkpoint.path,
                    seconds=checkpoint.seconds,
                    pause_s=checkpoint.pause_s,
                    metrics=checkpoint.metrics,
                )
            case ev.FragmentEnded(trainer=trainer, fragment=fragment):
                self._state(trainer, 'queued', at)
                samples = event.samples
                self._ledger.trainers.fragment_ended(
                    trainer,
                    fragment,
                    at=at,
                    ending=event.ending.value,
                    samples=samples,
                    reached=samples if event.reached is None else event.reached,
                    committed=event.committed,
                    error=event.error,
                )


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
