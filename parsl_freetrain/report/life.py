"""Whether a run is running, has ended or has died, and how to resume it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import RunBegan
from parsl_freetrain.core.model.state import History, RunState
from parsl_freetrain.journal.read import Journal
from parsl_freetrain.report.names import chosen

SILENT_S = 90.0
"""Seconds without an entry after which a run is silent; a live run makes one every 30 s."""

SAME_START_S = 2.0
"""Most seconds between the start of a run and of its process; beyond, the process id was reused."""


@dataclass(frozen=True)
class Liveness:
    state: str  #: 'running', 'ended', 'silent' (it may have died, or cannot write) or 'died'
    sentence: str = ''  #: an explanation if the run is silent or has died; otherwise empty


def lives_here(began: RunBegan) -> bool | None:
    """Whether the run's process lives; None if it cannot be seen from this computer."""
    if began.host != platform.node() or not began.started:
        return None
    try:
        process = psutil.Process(began.pid)
        late = abs(process.create_time() - began.started) > SAME_START_S
        return bool(not late and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None


def life_of(
    history: History,
    run: RunState,
    now: float,
    lives: Callable[[RunBegan], bool | None] = lives_here,
) -> Liveness:
    """The state of a run at ``now`` (epoch seconds). ``lives``: whether its process does."""
    if run.ended is not None:
        return Liveness('ended')
    began = run.began
    process = f'its process {began.pid} on {began.host}' if began.host else 'its process'
    living = lives(began)
    if not living and not history.alive(run):
        return Liveness(
            'died',
            f'This run died: {process} ended without a word, and another run has begun since.',
        )
    if living is False:
        how = f'{process} is gone, and did not end it. {_how_to_resume(run)}'
        return Liveness('died', f'This run died: {how}')
    silent_s = now - run.last_at
    if silent_s > SILENT_S:
        return Liveness(
            'silent',
            f'This run has noted nothing for {silent_s:.0f} s: {process} may have died, '
            f'or cannot write its ledger. If it is gone: {_how_to_resume(run)}',
        )
    return Liveness('running')


def check_live(journal: Journal, what: str) -> None:
    """Raise BadInput if the newest run is over, or there is none; ``what``: it is to do."""
    history = journal.history()
    run = chosen(history, journal.path)
    life = life_of(history, run, time.time())
    if life.state == 'ended':
        raise BadInput(
            f'The run of {journal.path} has ended ({run.how}), so there is nothing {what}.'
        )
    if life.state == 'died':
        raise BadInput(life.sentence)


def _how_to_resume(run: RunState) -> str:
    began = run.began
    where = f'in {began.folder} ' if began.folder and began.folder != os.getcwd() else ''
    again = f'run {began.command} {where}again' if began.command else 'run the same program again'
    kept = {name: one.samples > 0 for name, one in run.trainers.items()}
    if not any(kept.values()):
        return f'To resume, {again}; there is no checkpoint yet, so it begins anew.'
    anew = ' and '.join(repr(name) for name, has in kept.items() if not has)
    but = f'; of {anew} there is none yet' if anew else ''
    return f'To resume, {again}; it goes on from the checkpoints{but}.'
