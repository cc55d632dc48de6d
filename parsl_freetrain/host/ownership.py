"""Folders and files that only this user can change."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import write_new

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def refuse_foreign(folder: Path, what: str) -> None:
    """Refuse a folder that belongs to another user, or that others may write to.

    Parameters
    ----------
    folder
        A folder; nothing is done if it does not exist.
    what
        What it is, for the message.

    Raises
    ------
    BadInput
        With the command that forbids it, where there is one.
    """
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS:
        raise BadInput(
            f'Other users may write to {what} {folder} (mode {mode:04o}), so nothing is '
            'loaded from it: forbid that (chmod go-w) or name a folder of your own.'
        )
    if not is_ours(found.st_uid, folder):
        raise BadInput(
            f'The {what} {folder} belongs to another user (id {found.st_uid}), who could change '
            'what is in it: name a folder of your own.'
        )


def is_ours(owner: int, folder: Path) -> bool:
    """Whether this user is ``owner``, as the file system of ``folder`` names users: it may map
    their ids (root squash, user namespaces).
    """
    return owner == os.geteuid() or owner == _owner_of_new_files(folder)


def refuse_replaceable(folder: Path, what: str) -> None:
    """Refuse a path of which another user could replace a part: a folder above it that everybody
    may write to, or a link that another user has made. Raises BadInput, with the part.
    """
    parts = {*_with_parents(folder.absolute()), *_with_parents(folder.resolve())}
    for part in sorted(parts):
        try:
            found, above = part.lstat(), part.parent.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not above.st_mode & stat.S_IWOTH:
            continue
        if not above.st_mode & stat.S_ISVTX:
            raise BadInput(
                f'Everybody may write to {part.parent} (mode '
                f'{stat.S_IMODE(above.st_mode):04o}), and so could put another folder in place of '
                f'the {what} {folder}: forbid that (chmod o-w or chmod +t) or name another one.'
            )
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise BadInput(
                f'{part}, which the {what} {folder} leads through, is a link of another user (id '
                f'{found.st_uid}), who could change where it leads: name the folder itself.'
            )


def _with_parents(path: Path) -> list[Path]:
    return [path, *path.parents]


def _owner_of_new_files(folder: Path) -> int | None:
    probe = folder / f'.freetrain-probe-{secrets.token_hex(8)}'
    try:
        write_new(probe, b'whose is this?\n', durable=False)
        return probe.stat().st_uid
    except OSError:
        return None
    finally:
        probe.unlink(missing_ok=True)
