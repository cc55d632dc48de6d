"""How long a node's imports take: from the environment where it is, and from a packed copy on this
computer's own disk.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parsl_freetrain.cli.doctor.findings import Finding
from parsl_freetrain.cli.doctor.measuring import NODE_S, private_folder
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.sites.packed_environment import pack

MODULES = ('torch', 'torch.distributed', 'parsl', 'parsl_freetrain')
"""What a node imports before its first training step."""


def measure(prefix: Path, folder: Path, modules: tuple[str, ...] = MODULES) -> dict[str, Any]:
    """Measure an environment.

    Parameters
    ----------
    prefix
        The environment.
    folder
        Where it is packed; on a shared file system. All that is made is removed again.

    Returns
    -------
    dict
        ``prefix``, ``local`` (the folder on the own disk), ``bytes`` of the archive, and in seconds
        ``shared_s``, ``unpack_s``, ``local_s``; or only ``error``.
    """
    try:
        with private_folder(folder) as packed, tempfile.TemporaryDirectory() as local:
            archive = pack(prefix, packed / 'environment.tar')
            _forget(prefix)
            shared_s = _import_s(prefix, modules)
            _forget(packed)
            begun = time.perf_counter()
            subprocess.run(
                ['tar', '-xf', str(archive), '-C', local], check=True, capture_output=True
            )
            unpack_s = time.perf_counter() - begun
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


def of_imports(facts: Mapping[str, Any]) -> Finding:
    """Whether packing the environment pays."""
    if 'error' in facts:
        return Finding('imports', 'note', f'could not be compared: {facts["error"]}')
    packed_s = facts['unpack_s'] + facts['local_s']
    says = (
        f'{facts["shared_s"]:.1f} s from {facts["prefix"]} with nothing cached; '
        f'{facts["unpack_s"]:.1f} s to unpack {facts["bytes"] / 2**30:.2f} GiB in '
        f'{facts["local"]} and {facts["local_s"]:.1f} s from there'
    )
    if facts['shared_s'] > packed_s:
        return Finding(
            'imports', 'note', f'{says}: BackfillProvider(environment=PackedEnvironment()) pays'
        )
    return Finding(
        'imports',
        'ok',
        f'{says}: packing pays only where imports of many nodes at once take more than '
        f'{packed_s:.1f} s',
    )


def _forget(folder: Path) -> None:
    """Drop what this computer has cached of the files in a folder."""
    for path in folder.rglob('*'):
        if path.is_file() and not path.is_symlink():
            with path.open('rb') as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _import_s(prefix: Path, modules: tuple[str, ...]) -> float:
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    begun = time.perf_counter()
    subprocess.run(
        [prefix / 'bin' / 'python3', '-P', '-c', f'import {", ".join(modules)}'],
        env=environment,
        check=True,
        capture_output=True,
        timeout=NODE_S,
    )
    return time.perf_counter() - begun
