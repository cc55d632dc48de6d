"""Measurements of ``freetrain doctor``: here, in a probe on a node, and at an endpoint."""

import contextlib
import json
import os
import shutil
import socket
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

import psutil

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.host.files import sync_dir, write_new
from parsl_freetrain.sites.batch.scheduler_commands import Commands
from parsl_freetrain.sites.packed_environment import pack
from parsl_freetrain.sites.registry import SiteType
from parsl_freetrain.training.process.probe import RACES, appears, race

EXTRA_PROGRAMS = ('sacct', 'srun', 'mpiexec')
PROGRAM_S = 10.0
WRITES = 20
RACERS = 8
NODE_S = 300.0
MODULES = ('torch', 'torch.distributed', 'parsl', 'parsl_freetrain')
"""What a node imports before its first training step."""


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
        done = Commands(command[0], PROGRAM_S).run(command)
    except FreeTrainError as error:
        return f'does not answer: {error}'
    said = next(iter((done.stdout or done.stderr).strip().splitlines()), '')
    return said if done.returncode == 0 else f'does not answer: {said}'


def file_system(folder: Path) -> dict[str, Any]:
    """Whether a folder's file system supports checkpoints and ledgers, by a new folder in it."""
    free = shutil.disk_usage(folder).free
    found: dict[str, Any] = {'folder': str(folder), **_mount(folder), 'free_bytes': free}
    with private_folder(folder) as here:
        content = os.urandom(65536)
        times = [_seconds(write_new, here / f'w{n}', content) for n in range(WRITES)]
        found['fsync_ms'] = round(1000 * statistics.median(times), 3)
        found['fsync_dir_ms'] = round(1000 * _seconds(sync_dir, here), 3)
        found['mtime_skew_s'] = round(_skew(here / 'clock'), 3)
        (here / 'a').mkdir()
        (here / 'a').rename(here / 'b')
        found['rename'] = (here / 'b').is_dir()
        found['race'] = _local_race(here / 'race')
    return found


def _seconds(call: Any, *arguments: Any, **named: Any) -> float:
    begun = time.perf_counter()
    call(*arguments, **named)
    return time.perf_counter() - begun


def _mount(folder: Path) -> dict[str, str]:
    mounts = psutil.disk_partitions(all=True)[::-1]  # of several at one place, the last counts
    around = (one for one in mounts if folder.resolve().is_relative_to(one.mountpoint))
    best = max(around, key=lambda one: len(one.mountpoint), default=('', '', '', ''))
    return dict(zip(('mount', 'type', 'options'), best[1:], strict=True))


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
    made = {kind: sorted(n for one in racers for n in one[kind]) for kind in ('mkdir', 'create')}
    return {kind: numbers == list(range(RACES)) for kind, numbers in made.items()}


def free_ports(first: int, last: int) -> int:
    free = 0
    for port in range(first, last + 1):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(('', port))
            free += 1
    return free


def imports(prefix: Path, folder: Path, modules: tuple[str, ...] = MODULES) -> dict[str, Any]:
    """How long imports take from ``prefix``, and packed from an own disk; or ``error``."""
    try:
        with private_folder(folder) as packed, tempfile.TemporaryDirectory() as local:
            archive = pack(prefix, packed / 'environment.tar')
            _forget(prefix)
            shared_s = _import_s(prefix, modules)
            _forget(packed)
            unpack = ['tar', '-xf', str(archive), '-C', local]
            unpack_s = _seconds(subprocess.run, unpack, check=True, capture_output=True)
            return {
                'prefix': str(prefix),
                'local': str(Path(local).parent),
                'bytes': archive.stat().st_size,
                'shared_s': round(shared_s, 3),
                'unpack_s': round(unpack_s, 3),
                'local_s': round(_import_s(Path(local), modules), 3),
            }
    except subprocess.CalledProcessError as error:
        return {'error': f'{error.cmd[0]} has failed: {error.stderr.decode()[-300:]}'}
    except (BadInput, OSError, subprocess.TimeoutExpired) as error:
        return {'error': str(error)}


def _forget(folder: Path) -> None:
    """Drop what this computer has cached of the files in a folder."""
    for path in folder.rglob('*'):
        if path.is_file() and not path.is_symlink():
            with path.open('rb') as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _import_s(prefix: Path, modules: tuple[str, ...]) -> float:
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    command = [prefix / 'bin' / 'python3', '-P', '-c', f'import {", ".join(modules)}']
    return _seconds(
        subprocess.run, command, env=environment, check=True, capture_output=True, timeout=NODE_S
    )


@contextlib.contextmanager
def private_folder(where: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix='freetrain-doctor-', dir=where, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


ANSWER_S = 120.0  # a user's endpoint process may have to be started


def ask_there(command: Sequence[str], folder: Path, addresses: Sequence[str]) -> dict[str, Any]:
    """The probe's answer on a computer that ``command`` reaches, ``clock_skew_s`` and ``race``."""
    with private_folder(folder) as shared, socket.create_server(('', 0), backlog=8) as server:
        port = server.getsockname()[1]
        question = {'folder': str(shared), 'addresses': list(addresses), 'port': port}
        raced: dict[str, Any] = {}
        other = threading.Thread(target=_meet, args=(shared, raced), name='doctor-race')
        other.start()
        begun = time.time()
        answer = ask(command, question)
        ended = time.time()
        (shared / 'ready').touch()  # in case it never came
        other.join()
    if 'error' in answer:
        return answer
    both = 'race' in answer and 'race' in raced
    answer['race'] = once_each([answer['race'], raced['race']]) if both else None
    # It read its clock at some time between these two, so only a larger difference is certain.
    ahead_s, behind_s = max(0.0, answer['clock'] - ended), min(0.0, answer['clock'] - begun)
    answer['clock_skew_s'] = round(ahead_s + behind_s, 3)
    return answer


def _meet(shared: Path, raced: dict[str, Any]) -> None:
    if appears(shared / 'ready', NODE_S) is not None:
        with contextlib.suppress(OSError):
            (shared / 'go').touch()
            raced['race'] = race(shared)


def ask(command: Sequence[str], question: dict[str, Any]) -> dict[str, Any]:
    whole = [*command, sys.executable, '-P', '-m', 'parsl_freetrain.training.process.probe']
    asked = json.dumps(question)
    try:
        done = subprocess.run(
            whole, input=asked, capture_output=True, text=True, timeout=NODE_S, check=False
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


def ask_endpoint(endpoint_id: str, options: Path | None, executor: Any = None) -> dict[str, Any]:
    """Versions here and at a Globus Compute endpoint, whose template gets the file's options."""
    from parsl_freetrain.remote.client import FreeTrainClient

    try:
        config = None if options is None else dict(json.loads(options.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            f'The file {options} cannot be used ({error}); it must be user_endpoint_config as JSON.'
        ) from error
    where = None if executor else endpoint_id
    try:
        # The SDK prompts for a login on standard output, which is reserved for the result.
        with (
            contextlib.redirect_stdout(sys.stderr),
            FreeTrainClient(where, user_endpoint_config=config, executor=executor) as client,
        ):
            versions = [one._asdict() for one in client.compare_versions(ANSWER_S)]
            return {'id': endpoint_id, 'versions': versions}
    except Exception as error:  # any error is the result
        return {'id': endpoint_id, 'error': f'{error}' or type(error).__name__}
