"""The variables of the user's function, and what in them holds state that the context does not
know. Only here a caller's frame is read: torch has no registry of modules, and a search of the
garbage collector's objects takes as long as several steps.
"""

import ctypes
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import _lru_cache_wrapper
from queue import Queue, SimpleQueue
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from parsl_freetrain.training.data.inside import parts_of
from parsl_freetrain.training.loop.changes import has_state, is_library, is_ours, mark, may_be_saved
from parsl_freetrain.training.steps.buffers import is_plain

_PACKAGE, _ROOM = 'parsl_freetrain.', 'parsl_freetrain.training.'
_RANK = ('parsl_freetrain.training.loop.rank', 'parsl_freetrain.training.loop.debugging')
_DYNAMIC = '<dynamic-code>'  # what cloudpickle (3.1.3 and later) says of a function sent by value
_SHOWN = 6
_HOLDERS = Queue, SimpleQueue, threading.local, ContextVar, _lru_cache_wrapper
T = TypeVar('T')


def frame_around() -> FrameType | None:
    """The function that has called us: the nearest one outside of this room."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _module(frame).startswith(_ROOM):
        frame = frame.f_back
    return frame


def frames() -> Iterator[FrameType]:
    """The functions around us up to the user's, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame) not in _RANK:
        if not _module(frame).startswith(_PACKAGE):
            yield frame
        frame = frame.f_back


def set_variables(frame: FrameType, values: Mapping[str, Any]) -> None:
    frame.f_locals.update(values)
    if sys.version_info < (3, 13):  # later, a frame's variables can be set directly
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def among(names: Mapping[str, Any], kind: type[T]) -> dict[str, T]:
    """The objects of a kind among variables, in containers there, and in attributes of objects."""
    found: dict[str, T] = {}
    for name, value in names.items():
        for inner, one in _inside(value):
            if isinstance(one, kind):
                found.setdefault(f'{name}{inner}', one)
    return found


def unknown(
    names: Mapping[str, Any], known: Iterable[Any], before: Mapping[str, Any]
) -> dict[str, str]:
    """By name, what kind of state a variable holds that is none of the ``known`` objects, the
    likeliest first; a container by its first such element; what has changed since the marks
    ``before``. Own generators of random numbers are none: they are seeded.
    """
    ids = set(map(id, known))
    found: list[tuple[int, str, str]] = []
    for name in names.keys() & before.keys():
        value = names[name]
        if isinstance(value, (ModuleType, type)) or is_ours(value) or id(value) in ids:
            continue
        for inner, one in _inside(value):
            if id(one) not in ids and not is_ours(one) and (kind := _kind(one)) is not None:
                found.append((kind[0], f'{name}{inner}', kind[1]))
                break
        else:
            if mark_of(value) != before[name]:
                found.append((5, name, f'a {type(value).__name__} that changes'))
    return {name: kind for _, name, kind in sorted(found)}


def size(one: Any) -> float:
    """A number, or the norm of small tensors; 0: it is none."""
    inner = [one, *(each for _, each in parts_of(one))] if type(one) in (dict, list) else [one]
    tensors = [t for t in inner if type(t) is torch.Tensor and is_plain(t) and not t.is_meta]
    small = [t.detach() for t in tensors if t.is_floating_point() and t.numel() <= 10**6]
    return one if type(one) is float else float(torch.nn.utils.get_total_norm(small))


def sentence(found: Mapping[str, str]) -> str:
    """What :func:`unknown` has found, as a sentence; empty: nothing."""
    if not found:
        return ''
    shown = [f'{name} ({kind})' for name, kind in list(found.items())[:_SHOWN]]
    more = f' and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''
    return (
        'Variables of the function hold state that a new fragment makes anew, or that differs from '
        f'rank to rank: {", ".join(shown)}{more}.'
    )


def _kind(value: Any) -> tuple[int, str] | None:
    """How likely a value is to be state of the training, and what it is; None: it is none."""
    called = type(value).__name__
    if isinstance(value, torch.optim.Optimizer):
        return 0, f'an optimizer, {called}'
    if isinstance(value, torch.nn.Module):
        holds = any(True for _ in (*value.parameters(), *value.buffers()))
        return (1, f'a module, {called}') if holds else None
    if has_state(value):
        return 2, f'an object with a state_dict, {called}'
    if isinstance(value, _HOLDERS):
        return 3, f'of {called}, whose content is lost'
    if isinstance(value, Iterator):
        return 4, f'an iterator, {called}'
    trained = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    return (1, 'a tensor that is trained') if trained else None


def mark_of(value: Any) -> Any:
    """What shows a later change of plain values and of the user's own objects."""
    return mark(value) if may_be_saved(value) and not has_state(value) else None


def _inside(value: Any) -> list[tuple[str, Any]]:
    inner = () if isinstance(value, (type, torch.nn.Module, FunctionType)) else parts_of(value)
    return [('', value), *inner]


def is_users(function: Any) -> bool:
    ours = str(function.__module__).startswith(_PACKAGE)
    file = function.__code__.co_filename
    return not ours and (file == _DYNAMIC or not (file.startswith('<') or is_library(file)))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get('__name__', ''))
