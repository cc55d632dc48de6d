"""Folders and files that only this user can change."""

import grp
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host.files import create

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
_MOST_LINKS = 40  # the kernel opens no path that leads through more


def refuse_foreign(folder: Path, what: str) -> None:
    """Raise BadInput, with the remedy, if another user owns the folder or may write to it."""
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
    """Whether this user is ``owner`` to the file system of ``folder``, which may map ids."""
    return owner == os.geteuid() or owner == _owner_of_new_files(folder)


def refuse_replaceable(folder: Path, what: str, *, group_may: bool = False) -> None:
    """Raise BadInput for a path, called ``what``, of which another user could replace a part (a
    folder above it, or a link). It need not exist. ``group_may``: members of a group and owners of
    folders above may, where the folder's own owner is looked at whenever something in it is
    trusted.
    """
    for entry in _looked_up(folder):
        above = entry.parent
        try:
            # Nobody else reaches what is below a folder that nobody else may enter.
            if any(_is_closed(each) for each in entry.parents):
                continue
            found = above.stat()
        except (FileNotFoundError, NotADirectoryError):
            return
        mode = stat.S_IMODE(found.st_mode)
        could = f'could put another one in place of the {what} {folder}'
        if not group_may and not _is_trusted(found.st_uid, above):
            raise BadInput(
                f'{above} belongs to another user (id {found.st_uid}), who {could}: name one that '
                "has only your own folders and root's above it."
            )
        if mode & stat.S_IWOTH:
            who, forbid = 'Everybody', 'o-w'
        elif mode & stat.S_IWGRP and not group_may and not _is_private(found.st_gid):
            who, forbid = f'Every member of the group {_name(found.st_gid)}', 'g-w'
        else:
            continue
        if not mode & stat.S_ISVTX:
            raise BadInput(
                f'{who} may write to {above} (mode {mode:04o}), and so {could}: forbid that (chmod '
                f'{forbid} or chmod +t) or name one elsewhere.'
            )
        if entry.is_symlink() and not _is_trusted(owner := entry.lstat().st_uid, above):
            raise BadInput(
                f'{entry}, which the {what} {folder} leads through, is a link of another user (id '
                f'{owner}), who could change where it leads: name the folder itself.'
            )


def _looked_up(path: Path) -> Iterator[Path]:
    """What the kernel looks up on the way to ``path``, links included; none is above an entry."""
    at, links = Path('/'), 0
    ahead = list(path.absolute().parts[:0:-1])
    while ahead and links <= _MOST_LINKS:
        entry = at / ahead.pop()
        if entry.name == '..':
            at = at.parent
            continue
        yield entry
        if entry.is_symlink():
            target, links = entry.readlink(), links + 1
            at = Path('/') if target.is_absolute() else at
            ahead += [part for part in reversed(target.parts) if part != target.anchor]
        else:
            at = entry


def _is_trusted(owner: int, folder: Path) -> bool:
    """Whether ``owner`` is root (in a container, whoever has no number) or this user."""
    return owner in (0, os.geteuid(), _nobody()) or is_ours(owner, folder)


@cache
def _nobody() -> int | None:
    """The owner of what belongs to users outside of this user namespace; None in the first one."""
    if Path('/proc/self/uid_map').read_text().split() == ['0', '0', str(2**32 - 1)]:
        return None
    return int(Path('/proc/sys/kernel/overflowuid').read_text())


def _is_closed(folder: Path) -> bool:
    found = folder.stat()
    return not found.st_mode & _OTHERS_ENTER and found.st_uid in (0, os.geteuid())


def _is_private(group: int) -> bool:
    """Whether a group is of one: root's, or one that systems make for each user (umask of 002)."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    own = group == user.pw_gid and found.gr_name == user.pw_name
    return (own or group == 0) and not {*found.gr_mem} - {user.pw_name, 'root'}


def _name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def _owner_of_new_files(folder: Path) -> int | None:
    probe = folder / f'.freetrain-probe-{secrets.token_hex(8)}'
    try:
        # Of the file itself: another one may be under its name by now.
        with create(probe) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None
    finally:
        probe.unlink(missing_ok=True)
