"""The holder file: a small file in a run's own folder that says which run holds the blocks.

A block outlives the process that submitted it. Its nodes then read this file, which the next run
with the same name writes. For each adopted job, it has the command by which the job's nodes connect
to the new run.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.host import files
from parsl_freetrain.host.processes import start_of

_LARGEST = 16_000_000  # bytes


@dataclass(frozen=True)
class Holder:
    """A run, its process (``born`` tells it from a later one with the same id), and, by the ids of
    the jobs that it has adopted, the shell command that each node of a job runs.
    """

    run: str
    host: str
    pid: int
    born: str
    commands: Mapping[str, str] = field(default_factory=dict)

    def lives(self) -> bool:
        """Whether its process is a living process of this computer. Processes of other computers
        cannot be checked and count as dead.
        """
        return self.host == platform.node() and self.born == start_of(self.pid) != ''


def this_process(run: str, commands: Mapping[str, str] | None = None) -> Holder:
    """A holder for this process."""
    return Holder(run, platform.node(), os.getpid(), start_of(os.getpid()), commands or {})


def write_holder(path: Path, holder: Holder) -> None:
    """Write the holder of the blocks, atomically: readers see the old file or the new one."""
    files.replace(path, msgspec.json.encode(holder))


def read_holder(path: Path) -> Holder | None:
    """The holder of the blocks; None if there is none. Raises BadInput if other users can access
    the file, or it is damaged, so that its commands must not be run.
    """
    try:
        return msgspec.json.decode(files.read(path, _LARGEST), type=Holder)
    except FileNotFoundError:
        return None
    except BadInput:
        raise
    except ValueError:
        raise BadInput(f'{path} is not what a run has written; remove it.') from None


def release(path: Path, run: str) -> None:
    """Remove the holder file at the normal end of a run."""
    with contextlib.suppress(BadInput):
        holder = read_holder(path)
        if holder is not None and holder.run == run:
            path.unlink(missing_ok=True)


class LeasedCommands:
    """The commands for one node, from one holder after the other: of the holder file at ``path``,
    those of the node's ``job``.
    """

    def __init__(self, path: Path, job: str) -> None:
        self._path = path
        self._job = job
        self._served: set[str] = set()

    def claim(self) -> str | None:
        """The command of a holder that has adopted this job, once per holder; None if there is
        none.
        """
        try:
            holder = read_holder(self._path)
        except BadInput:
            return None
        if holder is None or holder.run in self._served or self._job not in holder.commands:
            return None
        self._served.add(holder.run)
        return holder.commands[self._job]
