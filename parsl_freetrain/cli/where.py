"""Finds the ledger, run and trainer that a command line names, for all verbs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from parsl_freetrain.core.model.errors import BadInput

NAME = 'ledger.sqlite'
FOLDER = 'checkpoints'
MOST_NAMES = 8

LedgerOption = Annotated[
    Path | None,
    typer.Option(
        '--ledger',
        metavar='PATH',
        help="The run's ledger, or the folder that it is in. Default: that of this folder or its "
        'checkpoints/, or of the nearest folder above that has one.',
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(
        '--run',
        metavar='NAME',
        help='A run of the ledger, by the beginning of its name. Default: the newest.',
    ),
]
JsonOption = Annotated[bool, typer.Option('--json', help='One JSON document on standard output.')]


def ledger_at(given: Path | None) -> Path:
    """Find the ledger. ``given``: a ledger; or a folder with ``ledger.sqlite`` or
    ``checkpoints/ledger.sqlite``; or None for the first such folder from the current one upwards.
    Raises BadInput if there is none.
    """
    if given is not None:
        path = given.absolute()
        found = next(_in_folder(path), None) if path.is_dir() else path if path.is_file() else None
        if found is None:
            raise BadInput(
                f'There is no run with the ledger {given}; name the {NAME} of a run, or '
                'the checkpoint_dir that it is in.'
            )
        return found
    here = Path.cwd()
    for folder in (here, *here.parents):
        for found in _in_folder(folder):
            return found
    raise BadInput(
        f'There is no {NAME} in {here}, its {FOLDER}/ or the folders above; go to where '
        'the run was started, '
        f'or name its checkpoint_dir with --ledger.'
    )


def _in_folder(folder: Path) -> Iterator[Path]:
    for path in (folder / NAME, folder / FOLDER / NAME):
        if path.is_file():
            yield path


def run_named(names: Sequence[str], given: str | None) -> str | None:
    """The run whose name begins with ``given``; None for the newest run. Raises BadInput if there
    is none, or more than one.
    """
    if given is None or given in names:
        return given
    found = [name for name in names if name.startswith(given)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadInput(
            f'{len(found)} runs have names that begin with {given!r}: {_list(found)}; '
            'give more of the name.'
        )
    raise BadInput(
        f'There is no run {given!r} in this ledger; it has '
        f'{_list(nearest(given, reversed(names))) or "none"}.'
    )


def trainer_named(names: Iterable[str], given: str) -> str:
    """The trainer of this name. Raises BadInput if there is none; the message lists the existing
    ones, the most similar first.
    """
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
