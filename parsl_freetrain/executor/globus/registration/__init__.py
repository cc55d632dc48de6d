"""Makes ``engine: type: FreeTrainEngine`` known to Globus Compute in every process that asks for
it.

Globus Compute looks up engines by name in its own package, and starts a new process for each user
endpoint. Put this package's folder (:data:`FOLDER`) on ``PYTHONPATH`` in the endpoint's
``user_environment.yaml``. Python then imports the folder's ``sitecustomize`` when it starts, which
calls :func:`register`. In a ``config.py``, import
:class:`parsl_freetrain.executor.globus.engine.FreeTrainEngine` instead.

``python -m parsl_freetrain.executor.globus.registration`` prints the folder.
"""

from __future__ import annotations

import os.path
import sys
from importlib.machinery import ModuleSpec, PathFinder

# Every Python process of an endpoint pays for what is imported here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from types import ModuleType
    from typing import Any

ENGINES = 'globus_compute_endpoint.engines'
NAME = 'FreeTrainEngine'
FOLDER = os.path.dirname(os.path.realpath(__file__))


def register() -> None:
    """Make the engine known. The engine itself is imported only on first use."""
    if ENGINES in sys.modules:
        _add(sys.modules[ENGINES])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add(engines: ModuleType) -> None:
    def find(name: str) -> Any:
        if name != NAME:
            raise AttributeError(f'module {ENGINES!r} has no attribute {name!r}')
        from parsl_freetrain.executor.globus.engine import FreeTrainEngine

        return FreeTrainEngine

    engines.__getattr__ = find  # type: ignore[method-assign]


class _Finder:
    """Intercepts the first import of Globus Compute's engines module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ENGINES:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Runs the real loader, and then adds the engine to the module."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        _add(module)
