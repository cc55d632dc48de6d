"""Asking a warm process of this computer to fork a warm parent for a node, and what the fork takes over from the asker."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from typing import Any

from parsl_freetrain.training.fragment import FragmentOrder, RankPlace

# Read once, when the interpreter, an allocator, OpenMP or torch starts: a process that has started cannot take them over.
_READ_AT_START = ('LD_', 'GLIBC_TUNABLES', 'MALLOC_', 'PYTHON', 'OMP_', 'GOMP_', 'KMP_AFFINITY', 'MKL_', 'OPENBLAS_', 'NPY_',
                  'TORCH', 'PYTORCH_', 'ATEN_')
_PACKAGES = ('torch', 'numpy', 'cloudpickle', 'tblib', 'parsl_freetrain')


@dataclass(frozen=True)
class ServerRequest:
    """A warm parent that is wanted, and the process for which it shall be as if that process had started it.

    Attributes
    ----------
    name, owner_pid, log
        As in :meth:`~parsl_freetrain.training.warm.WarmParent.start`.
    env, path, cwd, cpus
        The environment, ``sys.path``, the working directory and the CPUs of the asking process.
    prefix, version
        Which Python it runs.
    """

    name: str
    owner_pid: int
    log: str
    env: Mapping[str, str]
    path: list[str]
    cwd: str
    cpus: list[int]
    prefix: str
    version: str

    @classmethod
    def of_this_process(cls, name: str, owner_pid: int, log: str) -> ServerRequest:
        """What this process wants.

        Raises
        ------
        OSError
            If the working directory is gone.
        """
        return cls(name, owner_pid, log, start_environment(), _absolute_path(), os.getcwd(), sorted(os.sched_getaffinity(0)),
                   sys.prefix, sys.version)

    def message(self) -> dict[str, Any]:
        """As it is sent."""
        return {'kind': 'serve', 'request': asdict(self)}

    def obstacle(self, started_with: Mapping[str, str]) -> str:
        """Why a fork of this process, which was started with an environment, cannot be what was asked for; empty: it can."""
        if (self.prefix, self.version) != (sys.prefix, sys.version):
            return f'it runs Python {self.version} of {self.prefix}'
        for name in sorted(self.env.keys() | started_with.keys()):
            if name.startswith(_READ_AT_START) and name != 'PYTHONPATH' and self.env.get(name) != started_with.get(name):
                return f'{name} is {self.env.get(name)!r} there and {started_with.get(name)!r} here'
        for package in _PACKAGES:
            imported = getattr(sys.modules.get(package), '__file__', None)
            # None: found in another way than on the path, an editable installation for example.
            found = PathFinder.find_spec(package, self.path)
            if imported and found and found.origin and not _same_file(imported, found.origin):
                return f'its {package} is {found.origin}, the one here {imported}'
        return ''

    def take_effect(self, started_with: Mapping[str, str]) -> None:
        """Make this process, just forked from one started with an environment, what it would be if the asker had started it.

        Raises
        ------
        OSError
            If the working directory or the log cannot be used, or none of the CPUs.
        """
        os.chdir(self.cwd)
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.sched_setaffinity(0, self.cpus)
        # What imports have set since (torch does) they would have set there too.
        set_since = {name: value for name, value in os.environ.items() if name not in started_with}
        os.environ.clear()
        os.environ.update({**set_since, **self.env})
        sys.path[:] = self.path
        # What has been remembered of the old environment and path.
        time.tzset()
        tempfile.tempdir = None
        importlib.invalidate_caches()


def launch_of(request: bytes) -> tuple[FragmentOrder, RankPlace]:
    """What a rank is told, from the JSON document that asks for it."""
    document = json.loads(request)
    return FragmentOrder.from_json(document['order']), RankPlace(**document['place'])


def start_environment() -> dict[str, str]:
    """This process's environment, for a warm parent: with our modules, and fit for forks."""
    # numpy's threads would not survive a fork; the ranks' torch threads are set by the order.
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(_absolute_path()), 'OPENBLAS_NUM_THREADS': '1'}


def _absolute_path() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
