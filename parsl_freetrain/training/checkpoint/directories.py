"""The checkpoint directories in a trainer's folder: how they are named, made, moved and removed."""

import errno
import logging
import os
import re
import shutil
from itertools import count
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import OF_THE_MOMENT, sync_dir
from parsl_freetrain.training.checkpoint.manifest import MARKER

log = logging.getLogger(__name__)

_NAME = re.compile(r'ckpt-(\d{12,})-f(\d{6,})(?:-(\d+))?')


def fresh(folder: Path, name: str, first: int = 0) -> Path:
    """A new, private directory of this name, with a number, from ``first``, unless that is 0."""
    for n in count(first):
        path = folder / (f'{name}-{n}' if n else name)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise AssertionError('unreachable')


def name_of(samples: int, fragment: int) -> str:
    return f'ckpt-{samples:012d}-f{fragment:06d}'


def key(path: Path) -> tuple[int, int, int]:
    """Samples, fragment, and number of earlier directories of a checkpoint directory's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3] or 0)


def directories(folder: Path) -> list[Path]:
    """The checkpoint directories in ``folder``, committed or not, by samples and then fragment."""
    return sorted((folder / name for name in names(folder) if _NAME.fullmatch(name)), key=key)


def fragments_in(folder: Path) -> list[int]:
    """The fragments whose checkpoint directories are in ``folder``, with or without a suffix."""
    return [int(match[2]) for name in names(folder) if (match := _NAME.match(name))]


def names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno in OF_THE_MOMENT:
            raise
        raise BadInput(
            f'The folder {folder} cannot be read ({error.strerror}): put it back, or remove it.'
        ) from error


def move_into(path: Path, folder: Path) -> Path | None:
    for n in count(1):
        target = folder / f'{path.name}-{n}'
        if target.exists():
            continue
        try:
            path.rename(target)
        except FileNotFoundError:
            return None
        except OSError as error:
            # Another process has used this name since the check.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return target
    raise AssertionError('unreachable')


def remove(path: Path) -> None:
    # The marker goes first: the rest does not count as a checkpoint, if this is killed.
    try:
        (path / MARKER).unlink(missing_ok=True)
        sync_dir(path)
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        log.warning('Checkpoint directory %s could not be removed: %s', path, error)
