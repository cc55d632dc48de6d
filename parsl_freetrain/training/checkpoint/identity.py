"""A folder's trainer (``trainer.json``), and checks before a trainer may use a folder."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias, cast

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import make_dir, read_regular, replace, sync_dir, write_new
from parsl_freetrain.host.ownership import refuse_foreign
from parsl_freetrain.training.checkpoint.directories import fresh
from parsl_freetrain.training.checkpoint.manifest import TRAINER_FILE
from parsl_freetrain.training.spec.diloco import REPLICAS

JSON: TypeAlias = 'bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None'

FENCES = 'fences'
_MOST = 2**24  # bytes of a trainer file
_ANEW = (
    "give this trainer another name or folder, or resume='never' to move the old state aside "
    'and start anew'
)


def prove_writable(folder: Path, trainer: str) -> bool:
    """Make ``folder`` (0700), and prove that only this user can write to it; whether it is new."""
    with _refusing(folder, trainer):
        if not (made := make_dir(folder, durable=False)):
            probe = folder / f'.freetrain-probe-{secrets.token_hex(8)}'
            try:
                write_new(probe, b'can this be written?\n', durable=False)
            finally:
                probe.unlink(missing_ok=True)
    refuse_open(folder)
    return made


@contextmanager
def _refusing(folder: Path, trainer: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(
            f'Checkpoints of trainer {trainer!r} cannot be written to {folder} ({error.strerror}): '
            f'name a folder that you can write to and that the compute nodes see.'
        ) from error


def refuse_open(folder: Path) -> None:
    """BadInput, with the remedy, if others may write here: loading could run their code."""
    refuse_foreign(folder, 'checkpoint folder')


def record_or_compare(folder: Path, trainer: str, identity: Mapping[str, JSON]) -> None:
    """Write ``trainer.json`` into a new folder, or compare it; BadInput if it differs."""
    # To JSON and back, so that both sides have the same types (a tuple becomes a list).
    wanted = json.loads(json.dumps({'trainer': trainer, 'identity': identity}, sort_keys=True))
    path = folder / TRAINER_FILE
    if not is_trainer_folder(folder):
        if set(_contents(folder)) - {path}:
            raise BadInput(
                f'Folder {folder} for trainer {trainer!r} is not empty and is no checkpoint folder '
                f"(it has no {TRAINER_FILE}): name a folder that is new, empty or a trainer's."
            )
        text = json.dumps(wanted, indent=1, sort_keys=True) + '\n'
        with _refusing(folder, trainer):
            # The first fence makes it durable, too.
            replace(path, text.encode(), durable=(folder / FENCES).exists())
        return
    owner, theirs = _read(path)
    if owner != trainer:
        raise BadInput(
            f'Checkpoint folder {folder} belongs to trainer {owner!r}, not to {trainer!r}: {_ANEW}.'
        )
    differences = list(_differences(theirs, cast(dict[str, JSON], wanted['identity'])))
    if differences:
        raise BadInput(
            f'Checkpoint folder {folder} belongs to another trainer {trainer!r}, which had '
            f'{", ".join(differences)}: put that back, {_ANEW}.'
        )


def trainer_of(folder: Path) -> str:
    """The name of the trainer whose folder this is; raises BadInput if it cannot be read."""
    return _read(folder / TRAINER_FILE)[0]


def is_trainer_folder(folder: Path) -> bool:
    """An empty file of it is what a crash of the computer leaves before the first fence."""
    with suppress(FileNotFoundError):
        return (folder / TRAINER_FILE).lstat().st_size > 0 or (folder / FENCES).exists()
    return False


def move_aside(folder: Path) -> Path:
    """Move all but fences and earlier ``old-<n>`` into a new ``old-<n>``, and return it."""
    old = fresh(folder, 'old', 1)
    # trainer.json goes last: the folder still belongs to the trainer if this is killed.
    for path in sorted(_contents(folder), key=lambda path: path.name == TRAINER_FILE):
        path.rename(old / path.name)
    sync_dir(old)
    sync_dir(folder)
    return old


def _read(path: Path) -> tuple[str, dict[str, JSON]]:
    try:
        found = json.loads(read_regular(path, _MOST))
        return str(found['trainer']), dict(found['identity'])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(
            f"{path} cannot be understood ({error}), so the folder may be another trainer's: "
            f'{_ANEW}.'
        ) from error


def _contents(folder: Path) -> list[Path]:
    hidden = '.', 'old-'
    stay = FENCES, REPLICAS  # replicas' folders have fences of their own
    names = (p for p in folder.iterdir() if p.name not in stay)
    return sorted(p for p in names if not p.name.startswith(hidden))


def _differences(theirs: Mapping[str, JSON], ours: Mapping[str, JSON]) -> Iterator[str]:
    for field in sorted(theirs.keys() | ours.keys()):
        if field == 'shards' and not (field in theirs and field in ours):
            continue  # it followed from the nodes; ranks compare it with the checkpoint's
        if theirs.get(field) != ours.get(field) or (field in theirs) != (field in ours):
            yield f'{field} {_shown(theirs, field)} (here {_shown(ours, field)})'


def _shown(identity: Mapping[str, JSON], field: str) -> str:
    if field not in identity:
        return 'unset'
    text = json.dumps(identity[field])
    return text if len(text) <= 60 else text[:57] + '...'
