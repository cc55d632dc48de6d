"""Runs of a ledger by name; whether one lives, has ended or died, and how to resume it."""

import difflib
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.events import RunBegan
from parsl_freetrain.core.model.state import History, RunState
from parsl_freetrain.journal.read import Journal

SILENT_S = 90.0  # seconds without an entry after which a run is silent; one is made every 30 s

SAME_START_S = 2.0  # between the starts of a run and its process; else the process id was reused


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


MOST_NAMES = 8


def chosen(history: History, path: Path, given: str | None = None) -> RunState:
    """The run of the ledger ``path``; BadInput as in :func:`run_named`, or without any run."""
    if not history.runs:
        raise BadInput(f'The ledger {path} has no run yet.')
    name = run_named([run.name for run in history.runs], given)
    return next((run for run in history.runs if run.name == name), history.runs[-1])


def run_named(names: Sequence[str], given: str | None) -> str | None:
    """The run whose name begins with ``given`` (BadInput: none, or several); None: the newest."""
    if given is None or given in names:
        return given
    found = [name for name in names if name.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(
            f'{len(found)} runs have names that begin with {given!r}: {_list(found)}; give more.'
        )
    raise BadInput(
        f'There is no run {given!r} in this ledger; it has '
        f'{_list(nearest(given, reversed(names))) or "none"}.'
    )


def trainer_named(names: Iterable[str], given: str) -> str:
    """The trainer of this name. Raises BadInput if there is none, and names the most similar."""
    known = list(names)
    if given not in known:
        raise BadInput(
            f'There is no trainer {given!r} in this run; it has '
            f'{_list(nearest(given, known)) or "none"}.'
        )
    return given


def nearest(given: str, names: Iterable[str]) -> list[str]:
    return sorted(
        names,
        key=lambda name: (
            -round(difflib.SequenceMatcher(None, given.lower(), name.lower()).ratio(), 2)
        ),
    )


def _list(names: Sequence[str]) -> str:
    shown = ', '.join(map(repr, names[:MOST_NAMES]))
    return f'{shown} and {len(names) - MOST_NAMES} more' if len(names) > MOST_NAMES else shown
