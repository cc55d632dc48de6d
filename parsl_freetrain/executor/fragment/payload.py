"""A user's function on its way to the nodes."""

from __future__ import annotations

import copyreg
import functools
import importlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from parsl_freetrain.core.model.errors import BadInput

OURS = __name__.partition('.')[0]  # nodes have it, installed or not

_registering = threading.Lock()


def pack(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], trainer: str
) -> bytes:
    """Serialise a function with its arguments. One of an installed package is sent by name;
    anything else (a notebook, a script, a module beside it) by value, with what it uses of the
    modules beside it, since nodes may not be able to import them. Raises BadInput if that fails.
    """
    with _registering, _by_value(function):
        try:
            return bytes(cloudpickle.dumps((function, args, dict(kwargs))))
        except Exception as error:
            raise BadInput(
                f'Trainer {trainer!r} cannot be sent to the nodes: '
                f'{_culprit(function, args, kwargs)} cannot be serialised ({type(error).__name__}: '
                f'{error}); pass plain data, and open files and locks inside the function.'
            ) from error


@contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    home = _home(sys.modules.get(function.__module__.partition('.')[0]))
    known = cloudpickle.list_registry_pickle_by_value()  # whatever the user has registered stays so
    loaded = list(sys.modules.items())
    for _, module in loaded:
        # cloudpickle knows plain modules only; torch.backends.cudnn is of its own class.
        if isinstance(module, ModuleType) and type(module) is not ModuleType:
            copyreg.pickle(type(module), _by_import)
    # There are thousands of modules, and few packages.
    ours = {OURS, '__main__'}
    tops = {name.partition('.')[0] for name, _ in loaded if home is not None} - ours
    beside = {top for top in tops if _home(sys.modules.get(top)) == home}
    modules = [
        module
        for name, module in loaded
        if name.partition('.')[0] in beside
        and name not in known
        and getattr(module, '__name__', None) == name
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _by_import(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    return importlib.import_module, (module.__name__,)


def _home(top: ModuleType | None) -> Path | None:
    """A top-level module's folder; None if nodes have it too (installed, or Python's own)."""
    if top is None:
        return None
    file = getattr(top, '__file__', None)
    portions = list(getattr(top, '__path__', ()))
    if top.__name__ == '__main__':
        return Path(file).resolve().parent if file else Path.cwd()
    if portions:  # a package, maybe without an __init__.py
        home = Path(portions[0]).resolve().parent
    elif file:
        home = Path(file).resolve().parent
    else:
        return None
    return home if _installed_in().isdisjoint((home, *home.parents)) else None


@functools.cache
def _installed_in() -> frozenset[Path]:
    paths = sysconfig.get_paths()
    names = 'stdlib', 'platstdlib', 'purelib', 'platlib'
    return frozenset(Path(paths[name]).resolve() for name in names)


def _culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    named = [(f'argument {i + 1}', a) for i, a in enumerate(args)] + [
        (f'argument {k!r}', v) for k, v in kwargs.items()
    ]
    for what, value in named:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return what
    return f'the function {function.__qualname__!r} or something that it uses from around it'
