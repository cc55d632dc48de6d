"""Processes that tests look for."""

import contextlib
from collections.abc import Iterable

import psutil

from tests.support import template

# Parts of command lines that identify the processes of a node; fork servers and ranks have the same
# one.
KINDS = {
    'block': 'sites/local/slots.py',
    'manager': 'parsl_freetrain.executor.block.manager',
    'rank': 'training.process.fork_server',
    'worker': "a node's workers",
    'interchange': 'parsl_freetrain.executor.interchange',
}


def command_line(process: psutil.Process) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return ' '.join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ''


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _begun(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return 0.0


def descendants() -> set[psutil.Process]:
    """All of this process, and those of its templates (which may be no descendants themselves)."""
    found: set[psutil.Process] = set()
    for pid in template.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(pid).children(recursive=True))
    found.update(psutil.Process().children(recursive=True))
    return {process for process in found if process.pid not in template.pids()}


class Started:
    """The descendants that were started since this object was created, thus by one test."""

    def __init__(self) -> None:
        self._before = descendants()

    def processes(self) -> list[psutil.Process]:
        """Those that are running, oldest first."""
        return sorted(descendants() - self._before, key=_begun)


def forks(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The fork servers and ranks among ``processes``, in their order."""
    return [process for process in processes if KINDS['rank'] in command_line(process)]


def victims(kind: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes of a kind, sorted. Of fork servers and ranks, only the forked ones."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if KINDS[kind] in command_line(process) and (
                kind != 'rank' or (parent is not None and KINDS[kind] in command_line(parent))
            ):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)
