"""What each node of a job sees, for ``freetrain doctor --site``: accelerators, how long torch takes
to import, the folder for sockets, and the other nodes.

``python -P -m parsl_freetrain.training.process.node_check FOLDER NODES [INTERFACE]`` runs on every
node of the job. The nodes find each other by files in FOLDER, which is private.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parsl_freetrain.host.files import write_new
from parsl_freetrain.host.network import address_of, own_address
from parsl_freetrain.training.process.probe import connects, of_torch

MEET_S = 120.0
SOCKET_NAME = 'x' * 40
"""As long as the names that Python's multiprocessing and torch give to their sockets."""


def of_tmpdir() -> dict[str, str]:
    """The folder for temporary files, and why no socket can be in it; empty if one can."""
    where = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory(dir=where) as folder, socket.socket(socket.AF_UNIX) as one:
            one.bind(f'{folder}/{SOCKET_NAME}')
    except OSError as error:
        return {'folder': where, 'error': str(error)}
    return {'folder': where, 'error': ''}


def of_accelerators() -> int:
    """Number of accelerators that torch sees."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


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
        found['accelerators'] = of_accelerators()
    with socket.socket() as listening:
        try:
            listening.bind((address_of(interface) if interface else own_address(), 0))
            listening.listen()
            found['address'], found['port'] = listening.getsockname()
        except (OSError, ValueError) as error:
            found['address_error'] = f'{interface or "its own address"}: {error}'
        write_new(folder / f'{name}.node', json.dumps(found).encode(), durable=False)
        others = [json.loads(path.read_bytes()) for path in _wait_for(folder, '*.node', nodes)]
        lost = [
            other['node']
            for other in others
            if 'port' in other and not connects(other['address'], other['port'])
        ]
        write_new(
            folder / f'{name}.reached', json.dumps([found['node'], lost]).encode(), durable=False
        )
        _wait_for(folder, '*.reached', nodes)  # the others still connect here


if __name__ == '__main__':
    check(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
