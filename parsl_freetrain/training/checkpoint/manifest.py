"""What a checkpoint directory holds, and how it is verified.

A checkpoint directory has the data files, ``manifest.json`` (a list of them with digests) and,
written last, ``COMMITTED``, which holds the digest of the manifest. Without a complete
``COMMITTED`` it is not a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host.files import sync_dir, write_new

FORMAT = 1
MANIFEST = 'manifest.json'
MARKER = 'COMMITTED'
_DIGEST_BYTES = 32


class Damaged(FreeTrainError):
    """A committed checkpoint has changed since; the message says where."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    trainer: str
    samples: int
    fragment: int
    metrics: dict[str, float]
    files: tuple[tuple[str, int, str], ...]  # (name relative to the directory, bytes, digest)

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The handle to the checkpoint in ``folder``."""
        return Checkpoint(
            self.trainer, str(folder), self.samples, self.fragment, dict(self.metrics)
        )


def write_manifest(
    folder: Path, *, trainer: str, samples: int, fragment: int, metrics: Mapping[str, float]
) -> Manifest:
    """Make the data files in ``folder`` durable and private, and write their manifest.

    Raises
    ------
    BadInput
        If there is something other than plain files and directories, or a name that is reserved.
    """
    manifest = Manifest(
        trainer,
        samples,
        fragment,
        {name: float(value) for name, value in metrics.items()},
        tuple(_sealed_files(folder)),
    )
    write_new(
        folder / MANIFEST,
        json.dumps(
            {
                'format': FORMAT,
                'trainer': trainer,
                'samples': samples,
                'fragment': fragment,
                'metrics': manifest.metrics,
                'files': [
                    {'name': name, 'bytes': size, 'blake2b': digest}
                    for name, size, digest in manifest.files
                ],
            },
            indent=1,
        ).encode(),
    )
    sync_dir(folder)
    return manifest


def commit(folder: Path) -> None:
    """Write the marker: from now on the directory is a checkpoint."""
    write_new(folder / MARKER, _digest((folder / MANIFEST).read_bytes()).encode() + b'\n')
    sync_dir(folder)


def is_committed(folder: Path) -> bool:
    """Whether the marker is there and complete. A writer that was killed while it wrote the marker
    has not committed.
    """
    try:
        return len((folder / MARKER).read_bytes()) > 2 * _DIGEST_BYTES
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint, verified by its marker. The data files are not read.

    Raises
    ------
    Damaged
        If the manifest is not the one that was committed.
    BadInput
        If its format is not the one that this version reads.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        marker = (folder / MARKER).read_bytes()
    except OSError as error:
        raise _damage(error) from error
    if marker.decode('ascii', 'replace').strip() != _digest(content):
        raise Damaged(f'{MANIFEST} does not have the digest that {MARKER} holds')
    try:
        return _parse(json.loads(content), folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BadInput):
            raise
        raise Damaged(f'{MANIFEST} cannot be understood: {error!r}') from error


def verify(folder: Path) -> Manifest:
    """Read the whole checkpoint and compare every byte's digest with what was committed.

    Raises
    ------
    Damaged
        If a file is missing, or its length or content differs.
    OSError
        If the file system does not answer, which says nothing about the checkpoint.
    """
    manifest = read_manifest(folder)
    for name, size, digest in manifest.files:
        try:
            with (folder / name).open('rb') as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    raise Damaged(f'{name} has {found} bytes, {size} were committed')
                if hashlib.file_digest(file, _hasher).hexdigest() != digest:
                    raise Damaged(f'{name} does not have the digest that was committed')
        except OSError as error:
            raise _damage(error) from error
    return manifest


def _parse(document: Any, folder: Path) -> Manifest:
    if document['format'] != FORMAT:
        raise BadInput(
            f'Checkpoint {folder} has format {document["format"]} and this version of '
            f'parsl-freetrain reads format {FORMAT}: use the version that wrote it.'
        )
    return Manifest(
        str(document['trainer']),
        int(document['samples']),
        int(document['fragment']),
        {str(name): float(value) for name, value in document['metrics'].items()},
        tuple(
            (str(file['name']), int(file['bytes']), str(file['blake2b']))
            for file in document['files']
        ),
    )


def _sealed_files(folder: Path) -> list[tuple[str, int, str]]:
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
            else:
                sealed.append((relative, *_seal(path)))
        sync_dir(Path(parent))
    return sorted(sealed)


def _seal(path: Path) -> tuple[int, str]:
    with path.open('rb') as file:
        os.fchmod(file.fileno(), 0o600)
        digest = hashlib.file_digest(file, _hasher).hexdigest()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, digest


def _damage(error: OSError) -> Exception:
    # A file that is missing or that the disk cannot read is damage. Any other error (stale handle,
    # time-out, permission) says nothing about the file, and setting the checkpoint aside would lose
    # work.
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
        return Damaged(
            f'{Path(error.filename or "").name or "a file"} cannot be read: {error.strerror}'
        )
    return error


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
