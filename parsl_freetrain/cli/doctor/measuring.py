"""Measurements for ``freetrain doctor``: file system, programs, ports, and another computer."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parsl_freetrain.host.files import sync_dir, write_new
from parsl_freetrain.sites.registry import SiteType
from parsl_freetrain.training.process.probe import RACES, appears, race

EXTRA_PROGRAMS = ('sacct', 'srun', 'mpiexec')
PROGRAM_S = 10.0
WRITES = 20
RACERS = 8
NODE_S = 300.0


def programs(types: Collection[SiteType]) -> dict[str, dict[str, str]]:
    """Paths and versions of the installed programs of schedulers, MPI and Parsl."""
    versions = {kind.version[0]: kind.version for kind in types if kind.version}
    versions['mpiexec'] = ('mpiexec', '--version')
    wanted = [*(name for kind in types for name in kind.programs), *EXTRA_PROGRAMS, *versions]
    found = {}
    for name in dict.fromkeys(wanted):
        path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
        if path is not None:
            version = _version([path, *versions[name][1:]]) if name in versions else ''
            found[name] = {'path': path, 'version': version}
    return found


def _version(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f'does not answer: {error}'
    said = next(iter((done.stdout or done.stderr).strip().splitlines()), '')
    return said if done.returncode == 0 else f'does not answer: {said}'


def file_system(folder: Path) -> dict[str, Any]:
    """Measure whether a folder's file system supports checkpoints and ledgers.

    The measurements are made in a new folder in it, which is removed afterwards.
    """
    found: dict[str, Any] = {
        'folder': str(folder),
        **_mount(folder),
        'free_bytes': shutil.disk_usage(folder).free,
    }
    with private_folder(folder) as here:
        content = os.urandom(65536)
        times = []
        for number in range(WRITES):
            begun = time.perf_counter()
            write_new(here / f'w{number}', content)
            times.append(time.perf_counter() - begun)
        found['fsync_ms'] = round(1000 * statistics.median(times), 3)
        begun = time.perf_counter()
        sync_dir(here)
        found['fsync_dir_ms'] = round(1000 * (time.perf_counter() - begun), 3)
        found['mtime_skew_s'] = round(_skew(here / 'clock'), 3)
        (here / 'a').mkdir()
        (here / 'a').rename(here / 'b')
        found['rename'] = (here / 'b').is_dir()
        found['race'] = _local_race(here / 'race')
        found['sqlite'] = _sqlite(here / 'ledger.sqlite')
    return found


def _mount(folder: Path) -> dict[str, str]:
    """The mount that the folder is in: the one with the longest matching path."""
    best = ('', '', '')
    for line in Path('/proc/self/mounts').read_text().splitlines():
        _, point, kind, options, *_ = line.split(' ')
        point = point.encode().decode('unicode_escape')
        if folder.resolve().is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind, options)
    return dict(zip(('mount', 'type', 'options'), best, strict=True))


def _skew(path: Path) -> float:
    """The number of seconds by which the file server's clock is ahead of this computer's."""
    before = time.time()
    path.write_bytes(b'.')
    after = time.time()
    return path.stat().st_mtime - (before + after) / 2


def _local_race(folder: Path) -> dict[str, bool]:
    """Whether exactly one of several threads that create the same name succeeds."""
    folder.mkdir()
    line = threading.Barrier(RACERS)

    def run(_: int) -> dict[str, list[int]]:
        line.wait()
        return race(folder)

    with ThreadPoolExecutor(RACERS) as pool:
        return once_each(list(pool.map(run, range(RACERS))))


def once_each(racers: Sequence[dict[str, list[int]]]) -> dict[str, bool]:
    """For folders and files: whether each name was created by exactly one racer."""
    return {
        kind: sorted(number for racer in racers for number in racer[kind]) == list(range(RACES))
        for kind in ('mkdir', 'create')
    }


def _sqlite(path: Path) -> str:
    """An error of SQLite's locks; '' if they exclude a second writer and then admit it."""
    try:
        with (
            contextlib.closing(sqlite3.connect(path, isolation_level=None)) as one,
            contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0.1)) as other,
        ):
            one.execute('CREATE TABLE t (x)')
            one.execute('BEGIN IMMEDIATE')
            try:
                other.execute('BEGIN IMMEDIATE')
                return 'two writers held the lock at once'
            except sqlite3.OperationalError:
                pass
            one.execute('COMMIT')
            other.execute('INSERT INTO t VALUES (1)')
    except sqlite3.Error as error:
        return str(error)
    return ''


def free_ports(first: int, last: int) -> int:
    """The number of ports of a range that can be listened on now."""
    free = 0
    for port in range(first, last + 1):
        with socket.socket() as one:
            try:
                one.bind(('', port))
                free += 1
            except OSError:
                pass
    return free


def ask_here() -> dict[str, Any]:
    """The probe's answer on this computer, from a child process."""
    return _probe([], {})


def ask_there(command: Sequence[str], folder: Path, addresses: Sequence[str]) -> dict[str, Any]:
    """The probe's answer on another computer, which ``command`` reaches.

    Adds to the probe's own answer ``clock_skew_s`` (the certain part of the seconds by which its
    clock is ahead) and ``race`` (see :func:`once_each`; None: the two did not see each other's
    files). Without an answer there is only ``error``.
    """
    with private_folder(folder) as shared, socket.create_server(('', 0), backlog=8) as server:
        question = {
            'folder': str(shared),
            'addresses': list(addresses),
            'port': server.getsockname()[1],
        }
        raced: dict[str, Any] = {}
        other = threading.Thread(target=_meet, args=(shared, raced), name='doctor-race')
        other.start()
        begun = time.time()
        answer = _probe(command, question)
        ended = time.time()
        (shared / 'ready').touch()  # in case it never came
        other.join()
    if 'error' in answer:
        return answer
    answer['race'] = (
        once_each([answer['race'], raced['race']]) if 'race' in answer and 'race' in raced else None
    )
    # It read its clock at some time between these two, so only a larger difference is certain.
    answer['clock_skew_s'] = round(
        max(0.0, answer['clock'] - ended) + min(0.0, answer['clock'] - begun), 3
    )
    return answer


def _meet(shared: Path, raced: dict[str, Any]) -> None:
    if appears(shared / 'ready', NODE_S) is not None:
        with contextlib.suppress(OSError):
            (shared / 'go').touch()
            raced['race'] = race(shared)


def _probe(command: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    whole = [*command, sys.executable, '-P', '-m', 'parsl_freetrain.training.process.probe']
    try:
        done = subprocess.run(
            whole,
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=NODE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {'error': f'{type(error).__name__}: {error}'}
    for line in reversed(done.stdout.splitlines()):
        with contextlib.suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
    return {
        'error': f'{" ".join(whole)!r} ended with status {done.returncode} and no answer: '
        f'{done.stderr.strip()[-500:]}'
    }


@contextlib.contextmanager
def private_folder(where: Path) -> Iterator[Path]:
    """A new private folder, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix='freetrain-doctor-', dir=where))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
