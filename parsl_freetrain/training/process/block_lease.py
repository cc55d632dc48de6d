"""The holder file in a run's folder: which run holds the blocks, and how nodes reach it."""

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
    """A run, its process (``born``: not a later one of this id), and each adopted job's command."""

    run: str
    host: str
    pid: int
    born: str
    commands: Mapping[str, str] = field(default_factory=dict)

    def lives(self) -> bool:
        """Whether its process lives on this computer. Those of other computers count as dead."""
        return self.host == platform.node() and self.born == start_of(self.pid) != ''


def this_process(run: str, commands: Mapping[str, str] | None = None) -> Holder:
    return Holder(run, platform.node(), os.getpid(), start_of(os.getpid()), commands or {})


def write_holder(path: Path, holder: Holder) -> None:
    """Atomically: readers see the old file or the new one."""
    files.replace(path, msgspec.json.encode(holder))


def read_holder(path: Path) -> Holder | None:
    """None if there is none; BadInput (run nothing!) if it is damaged or others can access it."""
    try:
        return msgspec.json.decode(files.read(path, _LARGEST), type=Holder)
    except FileNotFoundError:
        return None
    except BadInput:
        raise
    except ValueError:
        raise BadInput(f'{path} is not what a run has written; remove it.') from None


def release(path: Path, run: str) -> None:
    with contextlib.suppress(BadInput):
        holder = read_holder(path)
        if holder is not None and holder.run == run:
            path.unlink(missing_ok=True)


class LeasedCommands:
    """The commands for the nodes of ``job``, from one holder of the file after the other."""

    def __init__(self, path: Path, job: str) -> None:
        self._path, self._job = path, job
        self._served: set[str] = set()

    def claim(self) -> str | None:
        """The command of a holder that has adopted this job, once per holder."""
        try:
            holder = read_holder(self._path)
        except BadInput:
            return None
        if holder is None or holder.run in self._served or self._job not in holder.commands:
            return None
        self._served.add(holder.run)
        return holder.commands[self._job]
