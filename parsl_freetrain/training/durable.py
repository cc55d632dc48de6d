"""Writing files so that they are still there, whole, after a crash of the process or of the machine."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_dir(folder: Path) -> None:
    """Make the entries of ``folder`` durable, where the file system can be asked to."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some user-space file systems have no fsync for directories; their entries are durable at once or never.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def write_new(path: Path, content: bytes) -> None:
    """Write a private (0600) file that does not exist yet, and make its bytes durable.

    The entry in the directory is durable only after :func:`sync_dir`.

    Raises
    ------
    FileExistsError
        If there is one of this name.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, 'wb', buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view):]
        os.fsync(file.fileno())


def make_private_dir(folder: Path) -> None:
    """Make ``folder`` with mode 0700, with its parents, unless it exists; durable in its parent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        sync_dir(folder.parent)
