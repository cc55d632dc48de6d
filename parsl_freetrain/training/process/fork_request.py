"""Requests to fork another fork server, with the settings of the requesting process."""

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.machinery import PathFinder

from parsl_freetrain.host.files import open_log
from parsl_freetrain.training.spec.fork_messages import ForkServerWanted

# Read when the interpreter, an allocator, OpenMP or torch starts: of no use to a running process.
_READ_AT_START = (
    *('LD_', 'GLIBC_TUNABLES', 'MALLOC_', 'PYTHON', 'OMP_', 'GOMP_', 'KMP_AFFINITY'),
    *('MKL_', 'OPENBLAS_', 'NPY_', 'TORCH', 'PYTORCH_', 'ATEN_'),
)
_PACKAGES = ('torch', 'numpy', 'cloudpickle', 'tblib', 'parsl_freetrain')


def request_of_this_process(name: str, owner_pid: int, log: str) -> ForkServerWanted:
    """Raises OSError if the working directory is gone."""
    return ForkServerWanted(
        name,
        owner_pid,
        log,
        env=start_environment(),
        path=_absolute_path(),
        cwd=os.getcwd(),
        cpus=sorted(os.sched_getaffinity(0)),
        prefix=sys.prefix,
        version=sys.version,
    )


def obstacle(request: ForkServerWanted, started_with: Mapping[str, str]) -> str:
    """Why no fork of this process, started in ``started_with``, can serve; empty if one can."""
    if (request.prefix, request.version) != (sys.prefix, sys.version):
        return f'it runs Python {request.version} of {request.prefix}'
    for name in sorted(request.env.keys() | started_with.keys()):
        differs = request.env.get(name) != started_with.get(name)
        if differs and name.startswith(_READ_AT_START) and name != 'PYTHONPATH':
            return f'{name} is {request.env.get(name)!r} there and {started_with.get(name)!r} here'
    for package in _PACKAGES:
        imported = getattr(sys.modules.get(package), '__file__', None)
        # None: found by other means than the path, for example an editable installation.
        found = PathFinder.find_spec(package, request.path)
        if (
            imported
            and found
            and found.origin
            and os.path.realpath(imported) != os.path.realpath(found.origin)
        ):
            return f'its {package} is {found.origin}, the one here {imported}'
    return ''


def take_effect(request: ForkServerWanted, started_with: Mapping[str, str]) -> None:
    """Make this fork what the requesting process would have started; or OSError."""
    os.chdir(request.cwd)
    log = open_log(request.log)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.sched_setaffinity(0, request.cpus)
    # What imports (of torch, for instance) have set since the start would also be set there.
    set_since = {name: value for name, value in os.environ.items() if name not in started_with}
    os.environ.clear()
    os.environ.update({**set_since, **request.env})
    sys.path[:] = request.path
    # These were cached from the old environment and path.
    time.tzset()
    tempfile.tempdir = None
    importlib.invalidate_caches()


def start_environment() -> dict[str, str]:
    """This process's environment, with our modules, and safe for forks."""
    # A set of texts, as of a vocabulary's words, has the same order on all nodes. numpy's threads
    # would not survive a fork; the order sets the ranks' torch threads.
    path = os.pathsep.join(_absolute_path())
    return {'PYTHONHASHSEED': '0', **os.environ, 'PYTHONPATH': path, 'OPENBLAS_NUM_THREADS': '1'}


def _absolute_path() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]
