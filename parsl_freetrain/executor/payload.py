"""A user's function on its way to the nodes."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from parsl_freetrain.core.errors import BadInput

_registering = threading.Lock()


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], trainer: str) -> bytes:
    """Serialise a function with its arguments.

    A function of an installed package is sent by name; anything else (a notebook, a script, a module
    beside it) by value, with what it uses of its own package, since nodes may not be able to import it.

    Raises
    ------
    BadInput
        If something in it cannot be serialised.
    """
    with _registering, _by_value(function):
        try:
            return bytes(cloudpickle.dumps((function, args, dict(kwargs))))
        except Exception as error:
            raise BadInput(f'Trainer {trainer!r} cannot be sent to the nodes: {_culprit(function, args, kwargs)} cannot be '
                           f'serialised ({type(error).__name__}: {error}); pass plain data, and open files and locks inside the function.'
                           ) from error


@contextmanager
def _by_value(function: Callable[..., Any]) -> Iterator[None]:
    home = sys.modules.get(function.__module__)
    package = function.__module__.partition('.')[0]
    modules = [m for name, m in list(sys.modules.items()) if m is not None and name.partition('.')[0] == package and name != '__main__']
    if home is None or _installed(home) or package == '__main__':
        modules = []
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _installed(module: ModuleType) -> bool:
    """Whether nodes have the module too: it is the interpreter's own, or installed beside it."""
    if not getattr(module, '__file__', None):
        return True
    places = {Path(path).resolve() for key, path in sysconfig.get_paths().items() if key in ('stdlib', 'platstdlib', 'purelib', 'platlib')}
    return not places.isdisjoint(Path(module.__file__ or '').resolve().parents)


def _culprit(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    named = [(f'argument {i + 1}', a) for i, a in enumerate(args)] + [(f'argument {k!r}', v) for k, v in kwargs.items()]
    for what, value in named:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return what
    return f'the function {function.__qualname__!r} or something that it uses from around it'
