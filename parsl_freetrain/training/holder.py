"""Which run holds the blocks, and what the blocks of an earlier run are to do for it: a small file in the run's own folder.

A block outlives the process that has submitted it. Its nodes then look into this file, which the next run of the same name
writes: it tells each job that it has adopted by which command its nodes reach the new run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from parsl_freetrain.core.errors import BadInput
from parsl_freetrain.training.durable import write_new

_LARGEST = 16_000_000   # bytes


@dataclass(frozen=True)
class Holder:
    """A run, its process, and the blocks that it has taken over.

    Attributes
    ----------
    run
        Unlike every other run.
    host, pid, born
        Its process; ``born`` tells it from a later one with the same number.
    commands
        What each node of an adopted job runs, as a shell command, by job id.
    """

    run: str
    host: str
    pid: int
    born: str
    commands: Mapping[str, str] = field(default_factory=dict)

    def lives(self) -> bool:
        """Whether its process is another one of this computer, and lives; of other computers that is not known."""
        return self.host == platform.node() and self.pid != os.getpid() and self.born == _born(self.pid) != ''


def this_process(run: str, commands: Mapping[str, str] | None = None) -> Holder:
    """A holder that is this process."""
    return Holder(run, platform.node(), os.getpid(), _born(os.getpid()), commands or {})


def _born(pid: int) -> str:
    """The kernel's start time of a process, empty where there is none."""
    with contextlib.suppress(OSError):
        state, *fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
        return '' if state in 'ZX' else fields[18]
    return ''


def write_holder(path: Path, holder: Holder) -> None:
    """Say who holds the blocks from now on; readers see the old file or the new one, whole."""
    part = path.with_name(f'{path.name}.{secrets.token_hex(4)}')
    write_new(part, json.dumps(asdict(holder)).encode())
    part.rename(path)


def read_holder(path: Path) -> Holder | None:
    """Who holds the blocks; None if nobody does.

    Raises
    ------
    BadInput
        The file is not this user's alone, or it is damaged: nothing that it says may be run.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f'{path} cannot be read ({error.strerror}); remove it.') from None
    with os.fdopen(fd, 'rb') as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise BadInput(f'{path} must be a file of yours that nobody else can read or write (mode 0600); remove it.')
        try:
            said = json.loads(file.read(_LARGEST))
            commands = {str(job): str(command) for job, command in said['commands'].items()}
            return Holder(str(said['run']), str(said['host']), int(said['pid']), str(said['born']), commands)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f'{path} is not what a run has written; remove it.') from None


def release(path: Path, run: str) -> None:
    """A run ends in order and holds nothing any more."""
    with contextlib.suppress(BadInput):
        holder = read_holder(path)
        if holder is not None and holder.run == run:
            path.unlink(missing_ok=True)


class Succession:
    """What one node is to run, one holder after the other.

    Parameters
    ----------
    path
        The holder file.
    job
        The id of this node's job.
    """

    def __init__(self, path: Path, job: str) -> None:
        self._path = path
        self._job = job
        self._served: set[str] = set()

    def claim(self) -> str | None:
        """The command of a holder that has adopted this job and has not been served yet."""
        try:
            holder = read_holder(self._path)
        except BadInput:
            return None
        if holder is None or holder.run in self._served or self._job not in holder.commands:
            return None
        self._served.add(holder.run)
        return holder.commands[self._job]
