"""Where the user's code keeps state beside the variables of the functions around a loop: global
variables, variables of functions that have returned, attributes of classes and functions, and
objects that only a bound method or a default argument holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.training.loop import changes
from parsl_freetrain.training.loop.unknown_state import frames, is_users

GLOBAL = 'global:'
_MOST, _ITEMS = 20_000, 64


@dataclass(frozen=True)
class Place:
    """``holder``: a namespace, a cell, a class or a function."""

    path: str
    holder: Any
    name: str

    def value(self) -> Any:
        if isinstance(self.holder, CellType):
            return self.holder.cell_contents
        return (self.holder if isinstance(self.holder, dict) else vars(self.holder))[self.name]

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)


class Places:
    """What can be reached from frames and ``others``; the user's ``classes`` by name."""

    def __init__(self, frames: Iterable[FrameType], others: Iterable[Any]) -> None:
        self.classes: dict[str, type] = {}
        self._found: dict[str, Place] = {}
        self._called, self._seen = Counter[str](), set[int]()
        self._waiting: deque[Any] = deque()
        frames = list(frames)
        self._around = {frame.f_code.co_qualname for frame in frames}
        for frame in frames:
            self._globals(frame.f_code, frame.f_globals)
            self._waiting += frame.f_locals.values()
        self._waiting += others
        while self._waiting and len(self._seen) < _MOST:
            one = self._waiting.popleft()
            if id(one) not in self._seen:
                self._seen.add(id(one))
                self._look_into(one)

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        for place in self._found.values():
            with suppress(ValueError, KeyError):  # it is empty, or gone
                yield place, place.value()

    def _add(self, path: str, holder: Any, name: str) -> None:
        place = Place(path, holder, name)
        with suppress(ValueError):
            self._waiting.append(place.value())
            self._found.setdefault(path, place)

    def _globals(self, code: CodeType, its: dict[str, Any]) -> None:
        module = its.get('__name__', '')
        for name in sorted(_names(code) & its.keys()):
            self._add(f'{GLOBAL}{module}:{name}', its, name)
            other = its[name]
            if isinstance(other, ModuleType) and changes.is_users_class(other.__name__):
                for inner in sorted(_names(code) & vars(other).keys()):
                    self._add(f'{GLOBAL}{other.__name__}:{inner}', vars(other), inner)

    def _look_into(self, one: Any) -> None:
        if isinstance(one, FunctionType):
            if is_users(one):
                self._function(one)
        elif isinstance(one, MethodType):
            name = self._numbered(one.__qualname__)
            if isinstance(one.__func__, FunctionType) and is_users(one.__func__):
                self._add(f'{name}.__self__', {'': one.__self__}, '')
            self._waiting.append(one.__func__)
        elif isinstance(one, partial):
            self._waiting += (one.func, *one.args, *one.keywords.values())
        elif isinstance(one, type):
            if changes.is_users_class(one.__module__) and not issubclass(one, Enum):
                self._class(one)
        elif isinstance(one, (property, staticmethod, classmethod)):
            self._waiting += (getattr(one, 'fget', None), getattr(one, '__func__', None))
        elif isinstance(one, torch.nn.Module):
            for module in one.modules():
                self._waiting += (type(module), *module._forward_hooks.values())
        elif isinstance(one, changes.CONTAINERS):
            if len(one) <= _ITEMS:
                self._waiting.extend(one.values() if isinstance(one, dict) else one)
        elif not (changes.is_ours(one) or isinstance(one, DataLoader)):
            own = changes.attributes(one)
            if own is not None and isinstance(one, Dataset):  # what else it has may be a cache
                name = self._numbered(type(one).__qualname__)
                for key in [
                    key for key, value in own.items() if isinstance(value, changes.SCALARS)
                ]:
                    self._add(f'{name}.{key}', one, key)
            elif own is not None:
                self._waiting += (type(one), *own.values())

    def _function(self, one: FunctionType) -> None:
        within = one.__qualname__.rpartition('.<locals>.')[0]
        name = self._numbered(one.__qualname__)
        for variable, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            if within not in self._around:
                self._add(f'{name}:{variable}', cell, variable)
        for key in [key for key in vars(one) if not key.startswith('__')]:
            self._add(f'{name}.{key}', one, key)
        defaults = *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()
        for i, value in enumerate(defaults):
            if isinstance(value, changes.CONTAINERS) or changes.attributes(value) is not None:
                self._add(f'{name}:default {i + 1}', {'': value}, '')
        self._globals(one.__code__, one.__globals__)

    def _class(self, one: type) -> None:
        self.classes.setdefault(one.__name__, one)
        for key, value in [*vars(one).items()]:
            if not key.startswith('__'):
                if changes.may_be_saved(value) and not callable(value):
                    self._add(f'{one.__qualname__}.{key}', one, key)
                self._waiting.append(value)
        self._waiting += one.__bases__

    def _numbered(self, name: str) -> str:
        self._called[name] += 1
        return f'{name}:{self._called[name]}'


@lru_cache(maxsize=10_000)
def _names(code: CodeType) -> frozenset[str]:
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(code.co_names).union(*inner)


def variables(functions: Iterable[Any] = ()) -> dict[str, Any]:
    """By name, the variables of the functions around us, nearest first, and of what they reach."""
    around, found = list(frames()), dict[str, Any]()
    for frame in around:
        found = {**frame.f_locals, **found}
    for place, one in Places(around, functions):
        found.setdefault(place.name or place.path, one)
    return found
