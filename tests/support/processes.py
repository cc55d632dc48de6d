"""What tests see of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

# How the processes of a node are told apart, by a part of their command line; of warm parents and ranks it is the same.
KINDS = {'block': 'sites/slots.py', 'manager': 'process_worker_pool.py', 'rank': 'training.warm_server'}


def command_line(process: psutil.Process) -> str:
    """Its words; empty for one that has ended, such as a child of an earlier test that nobody has asked about since."""
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


class Started:
    """What has been started, at first or second hand, since this was made: by one test, then, and nothing that others keep."""

    def __init__(self) -> None:
        self._before = set(psutil.Process().children(recursive=True))

    def processes(self) -> list[psutil.Process]:
        """Those that live now, the oldest first."""
        return sorted(set(psutil.Process().children(recursive=True)) - self._before, key=_begun)


def forks(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Warm parents and ranks, in the order given."""
    return [process for process in processes if KINDS['rank'] in command_line(process)]


def victims(kind: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of a kind, by process id, so that a seed picks the same one; of warm parents and ranks, those forked from another one."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if KINDS[kind] in command_line(process) and (kind != 'rank' or (parent is not None and KINDS[kind] in command_line(parent))):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)
