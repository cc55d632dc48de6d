"""What a computer reports about itself: versions, torch, GPUs, its clock, a folder, ports of
others. It answers a question (JSON) on standard input by JSON; with ``FOLDER NODES [INTERFACE]`` it
runs on every node of a job, for ``freetrain doctor --site``; nodes find each other by files in
FOLDER.
"""

import importlib.metadata
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from parsl_freetrain.host.files import create, write_new
from parsl_freetrain.host.network import address_of, own_address

PACKAGES = ('parsl-freetrain', 'parsl', 'torch', 'numpy', 'cloudpickle', 'pyzmq', 'psutil')
COMPARED = {'python': 2, 'parsl-freetrain': 3, 'cloudpickle': 1, 'torch': 2}
"""By package, how many leading parts of its versions must be equal at a client and an endpoint."""

PATIENCE_S = 60.0
RACES = 200
RACE_PAUSE_S = 0.0005
MEET_S = 120.0
SOCKET_NAME = 'x' * 40  # as long as the names that multiprocessing and torch give to sockets


def versions() -> dict[str, str | None]:
    """None for a package that is not installed."""
    found: dict[str, str | None] = {'python': platform.python_version(), **dict.fromkeys(PACKAGES)}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Comparison(NamedTuple):
    name: str
    here: str
    there: str
    fits: bool


def compare(
    here: Mapping[str, str | None], there: Mapping[str, str | None]
) -> tuple[Comparison, ...]:
    """Versions ``here`` (a client's) and ``there``; what the client lacks does not count."""
    found = []
    for name, count in COMPARED.items():
        mine, theirs = here.get(name) or '-', there.get(name) or '-'
        fits = mine == '-' or mine.split('.')[:count] == theirs.split('.')[:count]
        found.append(Comparison(name, mine, theirs, fits))
    return tuple(found)


def of_torch() -> dict[str, Any]:
    """Only an ``error`` if torch cannot be used."""
    begun = time.monotonic()
    try:
        import torch
        import torch.distributed as dist

        found: dict[str, Any] = {
            'version': torch.__version__,
            'import_s': round(time.monotonic() - begun, 3),
            'threads': torch.get_num_threads(),
            'cuda': torch.version.cuda,
            'cudnn': torch.backends.cudnn.version() if torch.cuda.is_available() else None,
            'gpus': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            'backends': [
                n for n in ('gloo', 'nccl', 'mpi') if getattr(dist, f'is_{n}_available')()
            ],
        }
        store = dist.TCPStore('127.0.0.1', 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group('gloo', store=store, rank=0, world_size=1)
        one = torch.ones(1)
        dist.all_reduce(one)
        dist.destroy_process_group()
        return {**found, 'gloo_works': one.item() == 1.0}
    except Exception as error:
        return {'error': f'{type(error).__name__}: {error}'}


def of_gpus() -> list[str]:
    for command in (['nvidia-smi', '-L'], ['rocm-smi', '--showproductname']):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()
    return []


def race(folder: Path) -> dict[str, list[int]]:
    """Numbers of the names made exclusively here; each caller takes them in another order."""
    made: dict[str, list[int]] = {'mkdir': [], 'create': []}
    for number in random.sample(range(RACES), RACES):
        time.sleep(RACE_PAUSE_S)
        with suppress(FileExistsError):
            (folder / f'd{number}').mkdir(mode=0o700)
            made['mkdir'].append(number)
        with suppress(FileExistsError):
            create(folder / f'f{number}').close()
            made['create'].append(number)
    return made


def appears(path: Path, patience_s: float = PATIENCE_S) -> float | None:
    """Seconds until another computer's file is visible here; None: it did not appear."""
    begun = time.monotonic()
    while time.monotonic() - begun < patience_s:
        if path.exists():
            return time.monotonic() - begun
        time.sleep(0.02)
    return None


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """``folder``: one that both sides should see; the other one listens at the addresses."""
    found: dict[str, Any] = {
        'host': platform.node(),
        'executable': sys.executable,
        'clock': time.time(),
        'cores': os.cpu_count(),
        'versions': versions(),
        'torch': of_torch(),
        'gpus': of_gpus(),
    }
    if 'port' in question:
        port = question['port']
        found['reaches'] = [one for one in question['addresses'] if connects(one, port)]
    if 'folder' in question:
        found['sees_folder'] = (folder := Path(question['folder'])).is_dir()
        if found['sees_folder']:
            try:
                (folder / 'ready').write_text(str(time.time()))
                if appears(folder / 'go') is not None:
                    found['race'] = race(folder)
            except OSError as error:
                found['folder_error'] = str(error)
    return found


def connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 3.0):
            return True
    except OSError:
        return False


def of_tmpdir() -> dict[str, str]:
    """The folder for temporary files, and why no socket can be in it (empty: one can)."""
    where = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(dir=where) as folder, socket.socket(socket.AF_UNIX) as one:
            one.bind(f'{folder}/{SOCKET_NAME}')
    except OSError as error:
        return {'folder': where, 'error': str(error)}
    return {'folder': where, 'error': ''}


def _wait_for(folder: Path, pattern: str, nodes: int) -> list[Path]:
    until = time.monotonic() + MEET_S
    while len(found := sorted(folder.glob(pattern))) < nodes and time.monotonic() < until:
        time.sleep(0.1)
    return found


def check(folder: Path, nodes: int, interface: str | None) -> None:
    """Write what this node sees into ``folder``, and which of the other nodes it reaches."""
    name = f'{socket.gethostname()}-{os.getpid()}'
    found: dict[str, Any] = {'node': os.environ.get('FREETRAIN_NODE', socket.gethostname())}
    found['tmpdir'] = of_tmpdir()
    found['torch'] = of_torch()
    if 'error' not in found['torch']:
        from torch import accelerator

        found['accelerators'] = accelerator.device_count() if accelerator.is_available() else 0
    with socket.socket() as listening:
        try:
            listening.bind((address_of(interface) if interface else own_address(), 0))
            listening.listen()
            found['address'], found['port'] = listening.getsockname()
        except (OSError, ValueError) as error:
            found['address_error'] = f'{interface or "its own address"}: {error}'
        write_new(folder / f'{name}.node', json.dumps(found).encode(), durable=False)
        others = [json.loads(path.read_bytes()) for path in _wait_for(folder, '*.node', nodes)]
        ports = [other for other in others if 'port' in other]
        lost = [one['node'] for one in ports if not connects(one['address'], one['port'])]
        reached = json.dumps([found['node'], lost]).encode()
        write_new(folder / f'{name}.reached', reached, durable=False)
        _wait_for(folder, '*.reached', nodes)  # the others still connect here


if __name__ == '__main__':
    if len(sys.argv) > 2:
        check(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        print(json.dumps(answer(json.load(sys.stdin))))
