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
from io import BufferedReader
from pathlib import Path
from typing import Any

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.host.files import sync_dir, write_new
from parsl_freetrain.training.checkpoint.block_digests import (
    DIGEST_BYTES,
    blocks_of,
    digest,
    digest_of_blocks,
)
from parsl_freetrain.training.checkpoint.identity import refuse_open

FORMAT = 2
_READ = (1, FORMAT)  # format 1 has no digests of blocks
MANIFEST = 'manifest.json'
MARKER = 'COMMITTED'


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
    blocks: dict[str, tuple[int, tuple[str, ...]]]  # by name: bytes, and each block's digest

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The handle to the checkpoint in ``folder``."""
        return Checkpoint(
            self.trainer, str(folder), self.samples, self.fragment, dict(self.metrics)
        )


def write_manifest(
    folder: Path,
    *,
    trainer: str,
    samples: int,
    fragment: int,
    metrics: Mapping[str, float],
    hashed: Mapping[str, tuple[str, ...]],
) -> Manifest:
    """Make the data files in ``folder`` durable and private, and write their manifest.

    ``hashed``: the files that are so already, with the digest of each block. They are not read.
    Raises BadInput if there is something other than plain files and directories, or a name that is
    reserved.
    """
    files = tuple(_sealed_files(folder, hashed))
    manifest = Manifest(
        trainer,
        samples,
        fragment,
        {name: float(value) for name, value in metrics.items()},
        files,
        {name: (size, tuple(hashed[name])) for name, size, _ in files if name in hashed},
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
                    {'name': name, 'bytes': size, 'blake2b': its_digest}
                    | ({'blocks': hashed[name]} if name in hashed else {})
                    for name, size, its_digest in files
                ],
            },
            indent=1,
        ).encode(),
    )
    sync_dir(folder)
    return manifest


def commit(folder: Path) -> None:
    """Write the marker: from now on the directory is a checkpoint."""
    write_new(folder / MARKER, digest((folder / MANIFEST).read_bytes()).encode() + b'\n')
    sync_dir(folder)


def is_committed(folder: Path) -> bool:
    """Whether the marker is there and complete. A writer that was killed while it wrote the marker
    has not committed.
    """
    try:
        return len((folder / MARKER).read_bytes()) > 2 * DIGEST_BYTES
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint, verified by its marker. The data files are not read.
    Raises Damaged if the manifest is not the one that was committed; BadInput if its format is not
    the one that this version reads.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        marker = (folder / MARKER).read_bytes()
    except OSError as error:
        raise damage(error) from error
    if marker.decode('ascii', 'replace').strip() != digest(content):
        raise Damaged(f'{MANIFEST} does not have the digest that {MARKER} holds')
    try:
        return _parse(json.loads(content), folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BadInput):
            raise
        raise Damaged(f'{MANIFEST} cannot be understood: {error!r}') from error


def manifest_digest(folder: Path) -> str:
    """The digest of the manifest in ``folder``; it stands for the whole checkpoint."""
    return digest((folder / MANIFEST).read_bytes())


def check_chosen(path: Path, folder: Path, chosen: str) -> None:
    """Check, before any of it is read, that ``path`` is the checkpoint that rank 0 has verified: it
    lies in the trainer's own ``folder``, and the digest of its manifest is ``chosen``. Raises
    Damaged if it is another one; BadInput if the folder is another user's, or others may write to
    it.
    """
    refuse_open(folder)
    if path.parent != folder or path.is_symlink():
        raise Damaged(f'{path} is no checkpoint in {folder}; nothing of it is read')
    if manifest_digest(path) != chosen:
        raise Damaged(f'{path} is not the checkpoint that rank 0 has verified')


def verify(folder: Path, *, blocks: bool = True) -> Manifest:
    """Read the whole checkpoint and compare every byte's digest with what was committed.

    ``blocks``: False leaves out the files whose blocks have digests, for a reader that verifies
    what it reads. Raises Damaged if a file is missing, or its length or content differs; OSError if
    the file system does not answer, which says nothing about the checkpoint.
    """
    manifest = read_manifest(folder)
    for name, size, committed in manifest.files:
        try:
            with (folder / name).open('rb') as file:
                found = os.fstat(file.fileno()).st_size
                if found != size:
                    raise Damaged(f'{name} has {found} bytes, {size} were committed')
                if name in manifest.blocks and not blocks:
                    continue
                if _digest_of(file, blocked=name in manifest.blocks) != committed:
                    raise Damaged(f'{name} does not have the digest that was committed')
        except OSError as error:
            raise damage(error) from error
    return manifest


def _parse(document: Any, folder: Path) -> Manifest:
    if document['format'] not in _READ:
        raise BadInput(
            f'Checkpoint {folder} has format {document["format"]} and this version of '
            f'parsl-freetrain reads formats {" and ".join(map(str, _READ))}: use the '
            'version that wrote it.'
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
        {
            str(file['name']): (int(file['bytes']), tuple(map(str, file['blocks'])))
            for file in document['files']
            if 'blocks' in file
        },
    )


def _sealed_files(
    folder: Path, hashed: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, int, str]]:
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
            elif relative in hashed:
                sealed.append((relative, path.stat().st_size, digest_of_blocks(hashed[relative])))
            else:
                sealed.append((relative, *_seal(path)))
        sync_dir(Path(parent))
    return sorted(sealed)


def _seal(path: Path) -> tuple[int, str]:
    with path.open('rb') as file:
        os.fchmod(file.fileno(), 0o600)
        found = hashlib.file_digest(file, _hasher).hexdigest()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, found


def damage(error: OSError) -> Exception:
    """What an error in reading a checkpoint means: :class:`Damaged`, or the error itself."""
    # A file that is missing or that the disk cannot read is damage. Any other error (stale handle,
    # time-out, permission) says nothing about the file, and setting the checkpoint aside would lose
    # work.
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO):
        return Damaged(
            f'{Path(error.filename or "").name or "a file"} cannot be read: {error.strerror}'
        )
    return error


def _digest_of(file: BufferedReader, *, blocked: bool) -> str:
    if blocked:
        return digest_of_blocks(blocks_of(file))
    return hashlib.file_digest(file, _hasher).hexdigest()


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
