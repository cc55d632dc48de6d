"""A user's function on its way to the nodes."""

import copyreg
import functools
import importlib
import inspect
import io
import operator
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from parsl_freetrain.core.model.errors import BadInput, TrainerFailed

OURS = __name__.partition('.')[0]  # nodes have it, installed or not

MOST_MB = 1000  # what is sent is in memory here and on each node several times

_registering = threading.Lock()
_NO_FILE = '<dynamic-code>'  # as cloudpickle has it


class Packed(NamedTuple):
    """A function with its arguments, serialised, and the futures that have no value in it yet."""

    payload: bytes
    waits_for: tuple[Future[Any], ...] = ()


def pack(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trainer: str,
    *,
    values: bool = False,
) -> Packed:
    """Serialise a function and arguments: installed ones by name, others by value with their
    modules; done futures as ``values``. Raises BadInput; TrainerFailed if a future has failed.
    """
    with _registering, _by_value(definition(function)):
        try:
            packed = _packed(_Sent((function, args, dict(kwargs))), trainer, values)
            given = _packed((args, kwargs), trainer, values=False) if packed.waits_for else packed
        except TrainerFailed:
            raise
        except Exception as error:
            raise BadInput(
                f'Trainer {trainer!r} cannot be sent to the nodes: '
                f'{_culprit(function, args, kwargs, values)} cannot be serialised '
                f'({type(error).__name__}: {error}); pass plain data, and open files and locks '
                'inside the function.'
            ) from error
    if (size_mb := len(packed.payload) / 1e6) > MOST_MB:
        raise BadInput(
            f'Trainer {trainer!r} cannot be sent to the nodes: with its arguments the function has '
            f'{size_mb:,.0f} MB, at most {MOST_MB:,} MB can be sent; write data to a file that the '
            'nodes see, pass its path, and read it inside the function.'
        )
    if not values and set(packed.waits_for) - set(given.waits_for):
        raise BadInput(
            f'Trainer {trainer!r} cannot be sent to the nodes: its function uses a future from '
            'around it; pass the future as an argument, in whose place the function finds its '
            'value.'
        )
    return packed


def definition(function: Callable[..., Any]) -> Any:
    """What of a callable has a module and a name: the function of a partial, an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, '__qualname__') else type(function)


class _Sent:
    """Looks for modules also where this program does, as in folders added to ``sys.path``."""

    def __init__(self, what: object) -> None:
        self._what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, ((_Folders(), self._what), 1)


class _Folders:
    def __reduce__(self) -> tuple[Any, ...]:
        found = dict.fromkeys(map(os.path.abspath, sys.path))
        return _look_in, ([one for one in found if _home_of(os.path.join(one, 'any'))],)


def _look_in(folders: list[str]) -> None:
    sys.path += [one for one in folders if one not in sys.path]  # last: what nodes have comes first


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Futures become their values."""

    def __init__(self, file: io.BytesIO, trainer: str, values: bool) -> None:
        super().__init__(file)
        self._trainer, self._values = trainer, values
        self.waits_for: list[Future[Any]] = []
        self._by_value = {'__main__', *cloudpickle.list_registry_pickle_by_value()}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is functools._lru_cache_wrapper and obj.__module__ in self._by_value:
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, CodeType) and obj.co_filename != _NO_FILE:
            # cloudpickle 3.1.3 forgets it, and tracebacks would not show the user's lines.
            named = operator.methodcaller('replace', co_filename=obj.co_filename)
            return named, (obj.replace(co_filename=_NO_FILE),)
        if not isinstance(obj, Future):
            return super().reducer_override(obj)
        value = None
        if not (self._values and obj.done()):
            self.waits_for.append(obj)
        else:
            try:
                value = obj.result()
            except BaseException as error:
                raise TrainerFailed(
                    f'Trainer {self._trainer!r} cannot start because one of its arguments failed: '
                    f'{type(error).__name__}: {error}.'
                ) from error
        return operator.getitem, ((value,), 0)


def _packed(what: object, trainer: str, values: bool) -> Packed:
    with io.BytesIO() as file:
        pickler = _Pickler(file, trainer, values)
        pickler.dump(what)
        return Packed(file.getvalue(), tuple(pickler.waits_for))


@contextmanager
def _by_value(defined: Any) -> Iterator[None]:
    home = _home(sys.modules.get(defined.__module__.partition('.')[0]))
    known = cloudpickle.list_registry_pickle_by_value()  # whatever the user has registered stays so
    modules = [m for m in _loaded.beside(home) if m.__name__ not in known]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    cloudpickles = vars(cloudpickle.cloudpickle)
    its_own = cloudpickles.get(_SEARCH)
    cloudpickles[_SEARCH] = _loaded.used_by
    try:
        yield
    finally:
        cloudpickles[_SEARCH] = its_own
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _cached(function: Any, how: dict[str, Any]) -> Any:
    """A function with a cache of its own, which pickle knows by name only."""
    return functools.lru_cache(**how)(function)


class _Loaded:
    """The program's modules, looked at again when one has come or gone."""

    def __init__(self) -> None:
        self._loaded: list[tuple[str, ModuleType]] = []
        self._in: dict[Path | None, list[ModuleType]] = {}
        self._below: dict[str, list[tuple[str, frozenset[str]]]] = {}

    def beside(self, home: Path | None) -> list[ModuleType]:
        """Those of a folder that nodes may lack."""
        if (loaded := list(sys.modules.items())) != self._loaded:
            packages: dict[str, list[ModuleType]] = {}
            for name, module in loaded:
                # cloudpickle knows plain modules only; torch.backends.cudnn is of its own class.
                if isinstance(module, ModuleType) and type(module) is not ModuleType:
                    copyreg.pickle(type(module), lambda m: (importlib.import_module, (m.__name__,)))
                if getattr(module, '__name__', None) == name:
                    packages.setdefault(name.partition('.')[0], []).append(module)
            self._in, self._below = {}, {}
            for top in packages.keys() - {OURS, '__main__'}:
                self._in.setdefault(_home(sys.modules.get(top)), []).extend(packages[top])
            self._loaded = loaded
        return [] if home is None else self._in.get(home, [])

    def used_by(self, code: CodeType, depends_on: Iterable[object]) -> list[ModuleType]:
        """The submodules that a function uses. cloudpickle's own search takes most of a call."""
        found, names = [], frozenset(code.co_names)
        for package in depends_on:
            if isinstance(package, ModuleType) and getattr(package, '__package__', None):
                prefix = f'{package.__name__}.'
                if prefix not in self._below:
                    self._below[prefix] = [
                        (name, frozenset(name[len(prefix) :].split('.')))
                        for name in list(sys.modules)
                        if name.startswith(prefix)
                    ]
                below = self._below[prefix]
                found += [sys.modules[name] for name, parts in below if parts <= names]
        return found


_loaded = _Loaded()
_SEARCH = '_find_imported_submodules'


def _home(top: ModuleType | None) -> Path | None:
    """A top-level module's folder; None if nodes have it too (installed, or Python's own)."""
    if top is None:
        return None
    file = getattr(top, '__file__', None)
    portions = list(getattr(top, '__path__', ()))
    if top.__name__ == '__main__':
        return Path(file).resolve().parent if file else Path.cwd()
    # A package, maybe without an __init__.py, or a module.
    return _home_of(portions[0] if portions else file) if portions or file else None


@functools.cache
def _home_of(place: str) -> Path | None:
    home = Path(place).resolve().parent
    return home if _installed_in().isdisjoint((home, *home.parents)) else None


@functools.cache
def _installed_in() -> frozenset[Path]:
    paths = sysconfig.get_paths()
    names = 'stdlib', 'platstdlib', 'purelib', 'platlib'
    return frozenset(Path(paths[name]).resolve() for name in names)


def _culprit(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], values: bool
) -> str:
    named = [(f'argument {i + 1}', a) for i, a in enumerate(args)] + [
        (f'argument {k!r}', v) for k, v in kwargs.items()
    ]
    for what, value in named:
        try:
            _packed(value, '', values)
        except Exception:
            return what
    name = definition(function).__qualname__
    return f'the function {name!r} or something that it uses from around it'


_NOT_CALLED = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def name_of(function: Callable[..., Any]) -> str:
    defined = definition(function)
    return f'{defined.__module__}.{defined.__qualname__}'


def unfit(function: Callable[..., Any]) -> str:
    """Why it cannot train; empty if it may."""
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        return 'it takes no positional argument; the first must be the fragment context'
    if isinstance(function, functools.partial) and function.args:
        return (
            'its first argument, the fragment context, is bound already; bind arguments by their '
            'names'
        )
    if first.name in ('self', 'cls') and inspect.isfunction(function):
        return (
            f'it is a method, which gets no {first.name} this way; decorate a function, or call '
            'freetrain_app(...)(an_object.its_method)'
        )
    called = definition(function), getattr(function, '__call__', None)  # noqa: B004
    if any(kind(one) for kind in _NOT_CALLED for one in called):
        return (
            'it is a coroutine or a generator, whose body no call runs; it must be a plain function'
        )
    return ''
