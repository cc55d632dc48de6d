"""Finds runs and trainers by their names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.state import History, RunState

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
    """The names, the most similar to ``given`` first, then the others in their order."""
    return sorted(
        names,
        key=lambda name: (
            -round(difflib.SequenceMatcher(None, given.lower(), name.lower()).ratio(), 2)
        ),
    )


def _list(names: Sequence[str]) -> str:
    shown = ', '.join(map(repr, names[:MOST_NAMES]))
    return f'{shown} and {len(names) - MOST_NAMES} more' if len(names) > MOST_NAMES else shown
