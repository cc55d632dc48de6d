"""Whether a run is running, has ended or has died, and how to resume it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.ledger.reader import Reader
from parsl_freetrain.ledger.rows import RunHistory, RunRow

SILENT_S = 90.0
"""Seconds without a ledger entry after which a run counts as silent; a live run makes an entry
every 30 s.
"""

SAME_START_S = 2.0
"""Maximum difference in seconds between the start times of a run and its process; a process with a
larger difference has reused the process id.
"""


@dataclass(frozen=True)
class Liveness:
    """The state of a run.

    Attributes
    ----------
    state
        'running', 'ended', 'silent' (it may have died, or cannot write) or 'died'.
    sentence
        An explanation if the run is silent or has died; otherwise empty.
    """

    state: str
    sentence: str = ''


def lives_here(about: Mapping[str, Any]) -> bool | None:
    """Whether the run's process lives; None if it cannot be seen from this computer."""
    if about.get('host') != platform.node() or 'pid' not in about:
        return None
    try:
        process = psutil.Process(int(about['pid']))
        return bool(
            abs(process.create_time() - float(about['started'])) <= SAME_START_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return None


def life_of(
    history: RunHistory,
    run: RunRow,
    about: Mapping[str, Any],
    now: float,
    lives: Callable[[Mapping[str, Any]], bool | None] = lives_here,
) -> Liveness:
    """The state of a run.

    Parameters
    ----------
    about
        User, host and process of the run; see :meth:`parsl_freetrain.ledger.reader.Reader.about`.
    now
        Epoch seconds.
    lives
        Whether that process lives; None if it is unknown.
    """
    if run.ended_at is not None:
        return Liveness('ended')
    process = (
        f'its process {about["pid"]} on {about["host"]}'
        if {'pid', 'host'} <= about.keys()
        else 'its process'
    )
    living = lives(about)
    if not living and not history.alive(run):
        return Liveness(
            'died',
            f'This run died: {process} ended without a word, and another run has begun since.',
        )
    if living is False:
        return Liveness(
            'died',
            f'This run died: {process} is gone, and did not end it. '
            f'{_how_to_resume(history, run, about)}',
        )
    silent_s = now - run.last_at
    if silent_s > SILENT_S:
        return Liveness(
            'silent',
            f'This run has noted nothing for {silent_s:.0f} s: {process} may have died, '
            'or cannot write its ledger. '
            f'If it is gone: {_how_to_resume(history, run, about)}',
        )
    return Liveness('running')


def check_live(reader: Reader, what: str) -> None:
    """Refuse a run that cannot answer; ``what``: what it is asked for, as in 'to cancel'. Raises
    BadInput if there is no run, or the newest one has ended or died.
    """
    history = reader.history()
    if not history.runs:
        raise BadInput(f'The ledger {reader.path} has no run yet.')
    run = history.runs[-1]
    life = life_of(history, run, reader.about(run), time.time())
    if life.state == 'ended':
        raise BadInput(
            f'The run of {reader.path} has ended ({run.how}), so there is nothing {what}.'
        )
    if life.state == 'died':
        raise BadInput(life.sentence)


def _how_to_resume(history: RunHistory, run: RunRow, about: Mapping[str, Any]) -> str:
    where = (
        f'in {about["folder"]} ' if about.get('folder') and about['folder'] != os.getcwd() else ''
    )
    again = f'run {run.command} {where}again' if run.command else 'run the same program again'
    kept = {t.name: t.samples > 0 for t in history.trainers if t.run == run.id}
    if not any(kept.values()):
        return f'To resume, {again}; there is no checkpoint yet, so it begins anew.'
    anew = ' and '.join(repr(name) for name, has in kept.items() if not has)
    but = f'; of {anew} there is none yet' if anew else ''
    return f'To resume, {again}; it goes on from the checkpoints{but}.'
