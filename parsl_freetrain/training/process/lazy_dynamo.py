"""Imports torch._dynamo (as long as torch) when used, not at every optimizer's first step."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NAME = 'torch._dynamo'
_ANSWER = '__dynamo_disable'  # the attribute in which torch/_compile.py keeps it


class _Utils:
    """Stands for torch._dynamo.utils; the package is loaded for anything but one setting."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(f'{_NAME}.utils'), name)

    def get_optimize_ddp_mode(self) -> str:
        """The default: who sets it has loaded the package."""
        return 'ddp_optimizer'


class _Later(ModuleType):
    """The package until something else than what is below is asked for: then it runs here."""

    utils = _Utils()

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        # Without __path__: its submodules must not be imported before the package itself.
        self.__spec__, self.__loader__, self.__file__ = spec, spec.loader, spec.origin
        self.__dict__['_later'] = (threading.RLock(), [])

    def __getattr__(self, name: str) -> Any:
        self._load()
        return getattr(self, name)

    def graph_break(self, *_: Any, **__: Any) -> None:
        """End a graph. Where nothing is compiled there is none."""

    def disable(self, fn: Any = None, recursive: bool = True, **how: Any) -> Any:
        """Have the compiler leave out a function; torch keeps the answer until there is one."""
        lock, given = self.__dict__.get('_later', (None, None))
        if lock is None or how != {'wrapping': False}:
            self._load()
            return vars(self)['disable'](fn, recursive, **how)
        with lock:
            given.append((fn, recursive))
        return fn

    def _load(self) -> None:
        lock, given = self.__dict__['_later']
        with lock:
            if type(self) is ModuleType:  # another thread was faster
                return
            spec = self.__spec__
            assert spec is not None
            assert spec.loader is not None
            self.__class__ = ModuleType  # type: ignore[assignment]
            self.__path__ = spec.submodule_search_locations or []
            spec.loader.exec_module(self)
            del self.__dict__['_later']
            disable: Callable[..., Any] = vars(self)['disable']
            for fn, recursive in given:
                setattr(fn, _ANSWER, disable(fn, recursive, wrapping=False))


def install() -> None:
    import torch

    spec = find_spec(_NAME)
    if spec is None or _NAME in sys.modules:
        return
    later = _Later(spec)
    sys.modules[_NAME] = later
    torch._dynamo = later


@contextmanager
def hidden() -> Iterator[None]:
    """For functions of torch that use torch._dynamo if it has been imported."""
    module = sys.modules.get(_NAME)
    if type(module) is not _Later:
        yield
        return
    del sys.modules[_NAME]
    try:
        yield
    finally:
        sys.modules.setdefault(_NAME, module)
