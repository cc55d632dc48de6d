"""How the controller's events and decisions are written into the ledger."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from parsl_freetrain.core import events as ev
from parsl_freetrain.core.state import Decision
from parsl_freetrain.core.statement import stated
from parsl_freetrain.core.words import Trainer
from parsl_freetrain.ledger.store import Ledger

# These come many times a minute and say nothing by themselves; progress has a table of its own.
UNRECORDED = (ev.Tick, ev.HolesSeen, ev.FragmentProgressed)


def about_this_process(checkpoint_dir: str) -> dict[str, Any]:
    """Who runs a run, where: what others need to know to tell whether it still lives, and to resume it."""
    return {'host': platform.node(), 'pid': os.getpid(), 'started': psutil.Process().create_time(), 'folder': os.getcwd(),
            'checkpoint_dir': str(Path(checkpoint_dir).absolute())}


def record_event(ledger: Ledger, event: ev.Event) -> None:
    """One row per event that can matter to an explanation."""
    if isinstance(event, UNRECORDED):
        return
    detail = {f.name: getattr(event, f.name) for f in dataclasses.fields(event)}
    known = {key: detail.pop(key, None) for key in ('trainer', 'fragment', 'block')}
    if isinstance(known['trainer'], Trainer):
        known['trainer'] = known['trainer'].name
    del detail['at']
    ledger.event(at=event.at, kind=type(event).__name__, node=None, detail=json.loads(json.dumps(detail, default=_plain)), **known)


def record_decision(ledger: Ledger, decision: Decision) -> None:
    """What was seen, what was decided, and what it is expected to gain."""
    ledger.decision(
        at=decision.at, trigger=decision.trigger, nodes=decision.nodes, status=decision.answer.status, solver=decision.answer.solver,
        objective=decision.answer.objective, seconds=decision.answer.seconds, staying=decision.staying, current=decision.current,
        allocation=decision.answer.allocation, actions=[describe(action) for action in decision.actions])
    document = stated(decision.problem)
    if document is not None:
        ledger.problem(document)


def describe(action: ev.Action) -> str:
    """An action in a few words; :mod:`parsl_freetrain.report.outcome` reads those about fragments."""
    match action:
        case ev.StartFragment(trainer, fragment, nodes):
            return f'start fragment {fragment} of {trainer} on {len(nodes)} nodes'
        case ev.StopFragment(trainer, fragment, why):
            return f'stop fragment {fragment} of {trainer}: {why}'
        case _:
            return repr(action)


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
