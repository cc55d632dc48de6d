"""Files that only this user can read and write, and that are still whole after a crash."""

import errno
import gzip
import math
import os
import secrets
import stat
import tomllib
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from parsl_freetrain.core.model.errors import BadInput, of_file

PRIVATE = 0o600


def create(path: Path, *, mode: int = PRIVATE) -> BinaryIO:
    """Open a new file for writing. Raises FileExistsError if the name is taken, by a link also."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), 'wb')


def write_new(path: Path, content: bytes, *, mode: int = PRIVATE, durable: bool = True) -> None:
    """Write a new file, or FileExistsError. ``durable``: on disk; its name by :func:`sync_dir`."""
    with create(path, mode=mode) as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def replace(path: Path, content: bytes, *, mode: int = PRIVATE, durable: bool = True) -> None:
    """Write in place of a file (readers see one, whole), or into a device or a pipe."""
    if path.is_char_device() or path.is_fifo():
        path.write_bytes(content)
        return
    draft = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.part')
    try:
        write_new(draft, content, mode=mode, durable=durable)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def open_log(path: str | Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE)


OF_THE_MOMENT = frozenset(
    {
        *(errno.ESTALE, errno.EACCES, errno.EPERM, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR),
    }
)
"""Errors in opening or reading a file that say nothing about it; all others mean damage."""


def open_regular(path: Path, limit: float = math.inf) -> BinaryIO:
    """Open a plain file of ours without waiting; else, or above ``limit`` bytes, OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_size <= limit:
        return os.fdopen(fd, 'rb')
    os.close(fd)
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, 'It is no regular file', str(path))
    raise OSError(errno.EFBIG, f'It has {found.st_size} bytes', str(path))


def read_regular(path: Path, limit: int) -> bytes:
    """All of a file of ours that has at most ``limit`` bytes; raises as :func:`open_regular`."""
    with open_regular(path, limit) as file:
        return file.read()


def read(path: Path, limit: int) -> bytes:
    """``limit`` bytes at most, where only this user can write; BadInput, FileNotFoundError."""
    try:
        opened = open_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadInput(f'{path} cannot be read ({error.strerror}); remove it.') from None
    with opened as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise BadInput(
                f'{path} must be a file of yours that nobody else can read or write '
                '(mode 0600); remove it.'
            )
        return file.read(limit)


def read_toml(path: str | Path, what: str, remedy: str) -> dict[str, object]:
    """What a TOML file, called ``what`` in errors, holds. Raises BadInput."""
    with of_file(f'{what} {path} cannot be read', remedy):
        text = Path(path).read_bytes()
    try:
        return tomllib.loads(text.decode())
    except ValueError as error:
        raise BadInput(f'{what} {path} is not TOML: {error}.') from None


def read_zipped(path: str | Path, what: str, most: int = -1) -> bytes:
    """A file, called ``what`` in errors, plain or gzipped, or the first ``most`` bytes of it."""
    try:
        with open(path, 'rb') as raw:
            zipped = raw.read(2) == b'\x1f\x8b'
        with gzip.open(path) if zipped else open(path, 'rb') as file:
            return file.read(most)
    except FileNotFoundError:
        raise BadInput(f'There is no file {path}; give {what}.') from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise BadInput(f'{path} cannot be read ({error}); give {what}.') from None


def make_dir(folder: Path, *, durable: bool = True) -> bool:
    """Make ``folder`` (0700) and its parents unless it exists; whether it was made now."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        folder.parent.mkdir(parents=True)  # FileExistsError: nothing can be made in it
        return make_dir(folder, durable=durable)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    if durable:
        sync_dir(folder.parent)
    return True


def sync_dir(folder: Path) -> None:
    """Make the entries of ``folder`` durable, where the file system can be asked to."""
    _sync(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def sync_file(path: Path) -> None:
    """Make a file of ours durable, if there is one, also one that another computer has written."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        file.read(1)
        _sync(os.dup(file.fileno()))


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems have no fsync for directories: entries are durable at once or never.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
