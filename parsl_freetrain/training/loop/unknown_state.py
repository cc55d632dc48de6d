"""The variables of the user's function, and what in them holds state that the context does not
know: it would be lost at the end of a fragment without a word.

This is the only place that reads a caller's frame. Such state shows in nothing that torch lets us
ask: no registry has all modules, and a search of the garbage collector's objects takes as long as
several steps and finds those of other libraries.
"""

from __future__ import annotations

import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

_PACKAGE, _ROOM = 'parsl_freetrain.', 'parsl_freetrain.training.'
_RANK = ('parsl_freetrain.training.loop.rank', 'parsl_freetrain.training.loop.debugging')
_LIBRARIES = tuple({'<', *(sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib'))})
_LONGEST = 1000  # elements of a container that are looked at
_SHOWN, _MARKED = 6, 16
T = TypeVar('T')


def names_around() -> Mapping[str, Any]:
    """The variables of the function that has called us: the nearest one outside of this room."""
    frame = frame_around()
    return frame.f_locals if frame is not None else {}


def frame_around() -> FrameType | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None and _module(frame).startswith(_ROOM):
        frame = frame.f_back
    return frame


def variables(functions: Iterable[Any] = ()) -> dict[str, Any]:
    """The variables of the user's function, of those between it and us, and of the functions among
    them and among ``functions``: their own, those around them, and the globals that they use. Of
    equal names, the nearest counts.
    """
    found: dict[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) not in _RANK:
        if not _module(frame).startswith(_PACKAGE):
            found = {**_used(frame.f_code, frame.f_globals), **frame.f_locals, **found}
        frame = frame.f_back
    waiting, seen = [*functions, *found.values()], set[int]()
    for one in waiting:
        function = getattr(getattr(one, 'func', one), '__func__', getattr(one, 'func', one))
        if isinstance(function, FunctionType) and id(function) not in seen and _is_users(function):
            seen.add(id(function))
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            theirs = _used(function.__code__, function.__globals__)
            for name, cell in cells:
                with suppress(ValueError):  # it is empty
                    theirs[name] = cell.cell_contents
            found = {**theirs, **found}
            waiting += theirs.values()
    return found


def marks(names: Mapping[str, Any]) -> dict[str, Any]:
    """By name, what shows a later change: of numbers and texts their value, of containers the
    length and some numbers and texts in them, of tensors how often they were changed.
    """
    return {name: _mark(value) for name, value in names.items()}


def among(names: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """The objects of a kind among variables, in containers there, and in attributes of objects."""
    found: dict[str, T] = {}
    for name, value in names.items():
        for inner, one in inside(value):
            if isinstance(one, kind):
                found.setdefault(f'{name}{inner}', one)
    return found


def inside(value: Any) -> Iterator[tuple[str, Any]]:
    """A value, and what is in it if it is a container or an object, with how to write that."""
    yield '', value
    if isinstance(value, (list, tuple)):
        yield from ((f'[{i}]', one) for i, one in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f'[{key!r}]', one) for key, one in value.items())
    elif not isinstance(value, (type, torch.nn.Module)) and hasattr(value, '__dict__'):
        yield from ((f'.{key}', one) for key, one in vars(value).items())


def unknown(
    names: Mapping[str, Any], known: Iterable[Any], before: Mapping[str, Any]
) -> dict[str, str]:
    """By name, what kind of state a variable holds that is none of the ``known`` objects, the
    likeliest first: optimizers, modules, what has a ``state_dict``, iterators, and what has changed
    since ``before``, the :func:`marks` of all that count. A container is named by the first of its
    elements that is state. Own generators of random numbers are none: they are seeded.
    """
    ids = set(map(id, known))
    found: list[tuple[int, str, str]] = []
    for name in names.keys() & before.keys():
        value = names[name]
        if isinstance(value, (ModuleType, type)) or _is_ours(value) or id(value) in ids:
            continue
        for inner, one in islice(inside(value), _LONGEST):
            if id(one) not in ids and not _is_ours(one) and (kind := _kind(one)) is not None:
                found.append((kind[0], f'{name}{inner}', kind[1]))
                break
        else:
            if _mark(value) != before[name]:
                found.append((5, name, f'a {type(value).__name__} that changes'))
    return {name: kind for _, name, kind in sorted(found)}


def sentence(found: Mapping[str, str]) -> str:
    """What :func:`unknown` has found, as a sentence; empty: nothing."""
    if not found:
        return ''
    shown = [f'{name} ({kind})' for name, kind in list(found.items())[:_SHOWN]]
    more = f' and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''
    return (
        'Variables of the function hold state that ctx does not know and a new fragment makes '
        f'anew: {", ".join(shown)}{more}.'
    )


def _kind(value: Any) -> tuple[int, str] | None:
    """How likely a value is to be state of the training, and what it is; None: it is none."""
    called = type(value).__name__
    if isinstance(value, torch.optim.Optimizer):
        return 0, f'an optimizer, {called}'
    if isinstance(value, torch.nn.Module):
        holds = any(True for _ in (*value.parameters(), *value.buffers()))
        return (1, f'a module, {called}') if holds else None
    if hasattr(value, 'state_dict') and hasattr(value, 'load_state_dict'):
        return 2, f'an object with a state_dict, {called}'
    if isinstance(value, Iterator):
        return 4, f'an iterator, {called}'
    trained = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    return (1, 'a tensor that is trained') if trained else None


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, dict, set, deque)):
        some = list(islice(value.values() if isinstance(value, dict) else value, _MARKED))
        return len(value), [one for one in some if isinstance(one, (bool, int, float, str))]
    return None


def _used(code: CodeType, its_globals: Mapping[str, Any]) -> dict[str, Any]:
    return {name: its_globals[name] for name in code.co_names if name in its_globals}


def _is_users(function: FunctionType) -> bool:
    return not function.__code__.co_filename.startswith(_LIBRARIES)


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith(_PACKAGE)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get('__name__', ''))
