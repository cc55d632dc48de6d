"""What a checkpoint directory holds: data files, ``manifest.json`` with their digests and, written
last, ``COMMITTED`` with that of the manifest, without which it is no checkpoint.
"""

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host import files as fs
from parsl_freetrain.training.checkpoint.block_digests import DIGEST_BYTES, blocks_of, digest

FORMAT = 4
MANIFEST = 'manifest.json'
MARKER = 'COMMITTED'
TRAINER_FILE = 'trainer.json'
SHARED_FOLDER = 'frozen/'
SHARED = f'../{SHARED_FOLDER}'  # how names of files begin that several checkpoints refer to
_MARKER_MOST, _MANIFEST_MOST = 1024, 2**30  # bytes
_MOMENT_S = 0.2


class Damaged(FreeTrainError):
    """A committed checkpoint has changed since; the message says where."""


class SharedDamaged(Damaged, BadInput):
    """A file is damaged to which several checkpoints refer, none of which is better."""


def damaged(name: str, what: str, part: str = '') -> Damaged:
    if not name.startswith(SHARED):
        return Damaged(f'{part}{name} {what}')
    return SharedDamaged(
        f'{name.removeprefix("../")} in the folder of the trainer {what}, and its checkpoints '
        'refer to it: put the file back, or train on with a function that makes the same frozen '
        'weights, of which it is written anew.'
    )


class File(msgspec.Struct, frozen=True):
    """A file: its name relative to the directory, its size, and the digest of each block."""

    name: str
    bytes: int
    blocks: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True):
    trainer: str
    samples: int
    fragment: int
    metrics: dict[str, float]
    files: tuple[File, ...] = ()
    format: int = FORMAT
    handed_in: str = ''

    def checkpoint(self, folder: Path) -> Checkpoint:
        how: Any = {'metrics': dict(self.metrics), 'handed_in': self.handed_in}
        return Checkpoint(self.trainer, str(folder), self.samples, self.fragment, **how)


def path_in(folder: Path, name: str) -> Path:
    return folder.parent / name.removeprefix('../') if name.startswith(SHARED) else folder / name


def write_manifest(
    folder: Path, manifest: Manifest, hashed: Mapping[str, tuple[str, ...]]
) -> Manifest:
    """Make files durable and private, unless ``hashed``, and write their manifest; BadInput."""
    files = _sealed_files(folder, hashed)
    shared = (name for name in sorted(hashed) if name.startswith(SHARED))
    files += tuple(File(n, path_in(folder, n).stat().st_size, hashed[n]) for n in shared)
    manifest = msgspec.structs.replace(manifest, files=files, format=FORMAT)
    # Python's own encoder writes metrics that are not finite.
    fs.write_new(folder / MANIFEST, json.dumps(msgspec.to_builtins(manifest), indent=1).encode())
    fs.sync_dir(folder)
    return manifest


def commit(folder: Path) -> None:
    """Write the marker: from now on the directory is a checkpoint."""
    fs.write_new(folder / MARKER, digest((folder / MANIFEST).read_bytes()).encode() + b'\n')
    fs.sync_dir(folder)


def is_committed(folder: Path) -> bool:
    """Whether the marker is complete: a writer killed while it wrote it has not committed."""
    try:
        return len(fs.read_regular(folder / MARKER, _MARKER_MOST)) > 2 * DIGEST_BYTES
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno in fs.OF_THE_MOMENT:
            raise
        return True  # it is damaged, which reading it will tell


def read_manifest(folder: Path) -> Manifest:
    """The manifest, verified by its marker; else Damaged, or BadInput for another format."""
    try:
        path = folder / MANIFEST
        content = fs.read_regular(path, _MANIFEST_MOST)
        path = folder / MARKER
        marker = fs.read_regular(path, _MARKER_MOST)
    except OSError as error:
        raise damage(error, path) from error
    if marker.decode('ascii', 'replace').strip() != digest(content):
        raise Damaged(f'{MANIFEST} does not have the digest that {MARKER} holds')
    try:
        document = json.loads(content)
        if document['format'] == FORMAT:
            return msgspec.convert(document, Manifest)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f'{MANIFEST} cannot be understood: {error!r}') from error
    raise BadInput(
        f'Checkpoint {folder} has format {document["format"]} and this version of parsl-freetrain '
        f'reads format {FORMAT}: use the version that wrote it.'
    )


def verify(
    folder: Path, *, content: bool = True, hashed: Collection[str] = (), shared: bool = True
) -> Manifest:
    """Read the whole checkpoint and compare every byte's digest with what was committed; only
    lengths without ``content`` and of what this process ``hashed``; nothing of files of several
    checkpoints without ``shared``. Raises Damaged, or OSError if the file system does not answer.
    """
    manifest = read_manifest(folder)
    for listed in manifest.files:
        if listed.name.startswith(SHARED) and not shared:
            continue
        try:
            with fs.open_regular(path_in(folder, listed.name)) as file:
                found = os.fstat(file.fileno()).st_size
                if found != listed.bytes:
                    raise damaged(listed.name, f'has {found} bytes, {listed.bytes} were committed')
                unread = not content or listed.name in hashed
                if not unread and blocks_of(file) != listed.blocks:
                    raise damaged(listed.name, 'does not have the digest that was committed')
        except OSError as error:
            raise damage(error, path_in(folder, listed.name)) from error
    return manifest


def _sealed_files(folder: Path, hashed: Mapping[str, tuple[str, ...]]) -> tuple[File, ...]:
    sealed = []
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in sorted(files) + sorted(folders):
            path = Path(parent, name)
            relative = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            if relative in (MANIFEST, MARKER):
                raise BadInput(
                    f'The name {relative!r} is reserved in a checkpoint: give the file another '
                    'name.'
                )
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise BadInput(
                    f'A checkpoint holds plain files and folders only, and {relative!r} is '
                    'neither: write a file instead.'
                )
            if stat.S_ISDIR(mode):
                path.chmod(0o700)
                continue
            if not (blocks := hashed.get(relative)):
                with path.open('rb') as file:
                    os.fchmod(file.fileno(), 0o600)
                    blocks = blocks_of(file)
                    os.fsync(file.fileno())
            sealed.append(File(relative, path.stat().st_size, tuple(blocks)))
        fs.sync_dir(Path(parent))
    return tuple(sorted(sealed, key=lambda file: file.name))


def damage(error: OSError, path: Path) -> Exception:
    """What an error in reading a checkpoint's file means: :class:`Damaged`, or the error itself."""
    # To set a checkpoint aside for an error of the moment would lose work.
    if error.errno in fs.OF_THE_MOMENT or (error.errno == errno.EIO and not _is_lost(path)):
        return error
    name = f'{SHARED}{path.name}' if path.parent.name == Path(SHARED).name else path.name
    return damaged(name, f'cannot be read: {error.strerror or error}')


def _is_lost(path: Path) -> bool:
    """A file still unreadable while its directory is readable; else the file system is at fault."""
    time.sleep(_MOMENT_S)
    os.listdir(path.parent)
    with contextlib.suppress(FileNotFoundError):
        fs.read_regular(path.parent.parent / TRAINER_FILE, _MANIFEST_MOST)
    try:
        with fs.open_regular(path) as file:
            blocks_of(file)
    except OSError:
        return True
    return False
