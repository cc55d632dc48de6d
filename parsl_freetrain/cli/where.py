"""Finds the ledger that a command line names, for all verbs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.journal.read import Journal

NAME = 'ledger.journal'
FOLDER = 'checkpoints'

NO_HOLES = (
    'There are no holes now: nodes are busy or reserved, leave too soon, or lack features or GPUs '
    'that the site asks for.'
)


def value(metavar: str, text: str, *names: str) -> Any:
    """An option: what its value is called, its help, and its name if it is not the argument's."""
    return typer.Option(*names, metavar=metavar, help=text)


def flag(text: str, *names: str) -> Any:
    """An option without a value."""
    return typer.Option(*names, help=text)


LedgerOption = Annotated[
    Path | None,
    value(
        'PATH',
        "The run's ledger, or the folder that it is in. Default: that of this folder or its "
        'checkpoints/, or of the nearest folder above that has one.',
        '--ledger',
    ),
]
RunOption = Annotated[
    str | None,
    value(
        'NAME', 'A run of the ledger, by the beginning of its name. Default: the newest.', '--run'
    ),
]
SiteOption = Annotated[
    str | None,
    value(
        'NAME|FILE',
        'Required. The site: local, a name in site_configs/, or a .py or .toml file.',
        '--site',
    ),
]
JsonOption = Annotated[bool, flag('One JSON document on standard output.', '--json')]


def print_json(document: Any) -> None:
    """Print one line of JSON, which has no number that is not finite: those are null."""
    print(json.dumps(json.loads(json.dumps(document), parse_constant=lambda _: None)), flush=True)


def ledger_at(given: Path | None) -> Path:
    """The ledger itself, in a folder or its checkpoints/, or the nearest above; or BadInput."""
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
        f'There is no {NAME} in {here}, its {FOLDER}/ or the folders above; go to where the run '
        'was started, or name its checkpoint_dir with --ledger.'
    )


def _in_folder(folder: Path) -> Iterator[Path]:
    for path in (folder / NAME, folder / FOLDER / NAME):
        if path.is_file():
            yield path


def journal_at(given: Path | None, *, keep_progress: bool = True) -> Journal:
    return Journal(ledger_at(given), keep_progress=keep_progress)
