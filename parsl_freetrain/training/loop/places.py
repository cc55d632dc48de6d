"""Where the user's code keeps state beside the variables of the functions around a loop: global
variables, variables of functions that have returned, attributes of classes and functions, and
objects that only a bound method or a default argument holds.
"""

import dis
import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import _lru_cache_wrapper, lru_cache, partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.training.data.inside import inside
from parsl_freetrain.training.data.own_generators import seeding
from parsl_freetrain.training.loop import changes
from parsl_freetrain.training.loop.unknown_state import frames, is_users

GLOBAL = 'global:'
_MOST, _ITEMS = 20_000, 64
OF_TORCH = {*vars(torch.nn.Module())}
_OF_TENSORS = '_backward_hooks', '_post_accumulate_grad_hooks'
_ENDS = 'RETURN_VALUE', 'RETURN_CONST', 'RAISE_VARARGS', 'RERAISE', 'JUMP_FORWARD', 'JUMP_BACKWARD'


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
    """What can be reached from frames and ``others``; the user's ``classes``; ``kept``: paths."""

    def __init__(
        self, frames: Sequence[FrameType], others: Iterable[Any], kept: Collection[str] = ()
    ) -> None:
        self.classes: dict[str, type] = {}
        self.datasets, self._kept = dict[str, Any](), kept
        self._libraries: list[tuple[str, Any]] = []  # modules of other packages
        self.stored = set[str]()  # names of attributes that functions set
        self.modules: dict[str, torch.nn.Module] = {}  # the user's own
        self.caches = list[Any]()
        self._found: dict[str, Place] = {}
        self._called, self._seen = Counter[str](), set[int]()
        self._waiting: deque[Any] = deque()
        self._around = {frame.f_code.co_qualname for frame in frames}
        for frame in frames:
            self._globals(frame.f_code, frame.f_globals)
            self._waiting += frame.f_locals.values()
        self._given('a function', [*others])
        while self._waiting and len(self._seen) < _MOST:
            one = self._waiting.popleft()
            if id(one) not in self._seen:
                self._seen.add(id(one))
                self._look_into(one)
        for path, one in self._libraries:  # such as criterion.label_smoothing
            for key in sorted((self.stored & vars(one).keys()) - OF_TORCH):
                if isinstance(vars(one)[key], changes.SCALARS):
                    self._add(f'{path}.{key}', one, key)

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        for place in self._found.values():
            with suppress(ValueError, KeyError):  # it is empty, or gone
                yield place, place.value()

    def with_packages(self, packages: Mapping[str, Any]) -> 'Places':
        """And what they count, add up or wait for: meters, updates of targets, callbacks."""
        for path, one in packages.items():
            for key, value in [*vars(one).items()]:
                if isinstance(value, changes.KINDS):
                    self._add(f'package:{path}.{key}', vars(one), key)
        return self

    def _add(self, path: str, holder: Any, name: str) -> None:
        place = Place(path, holder, name)
        with suppress(ValueError):
            self._waiting.append(place.value())
            self._found.setdefault(path, place)

    def _globals(self, code: CodeType, its: dict[str, Any]) -> None:
        module = its.get('__name__', '')
        self.stored |= frozenset() if code.co_name == '__init__' else _names(code, stored=True)
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
            name, its = self._numbered(one.__qualname__), one.__self__
            users = isinstance(one.__func__, FunctionType) and is_users(one.__func__)
            if users or (changes.has_state(its) and not isinstance(its, torch.nn.Module)):
                self._add(f'{name}.__self__', {'': one.__self__}, '')
            self._waiting.append(one.__func__)
        elif isinstance(one, partial):
            name = self._numbered(getattr(one.func, '__qualname__', type(one.func).__qualname__))
            self._given(f'{name}:partial', (one.func, *one.args, *one.keywords.values()))
        elif isinstance(one, _lru_cache_wrapper):
            if isinstance(one.__wrapped__, FunctionType) and is_users(one.__wrapped__):
                self.caches.append(one)
            self._waiting.append(one.__wrapped__)
        elif isinstance(one, type):
            if changes.is_users_class(one.__module__) and not issubclass(one, Enum):
                self._class(one)
        elif isinstance(one, (property, staticmethod, classmethod)):
            self._waiting += (getattr(one, 'fget', None), getattr(one, '__func__', None))
        elif isinstance(one, torch.nn.Module):
            top = self._numbered(type(one).__qualname__)
            for name, module in one.named_modules():
                if module is one or id(module) not in self._seen:
                    self._seen.add(id(module))
                    self._module(f'{top}.{name}', module)
        elif isinstance(one, changes.CONTAINERS):
            if len(one) <= _ITEMS:
                self._waiting.extend(one.values() if isinstance(one, dict) else one)
        elif isinstance(one, Dataset):
            self._dataset(one)
        elif isinstance(one, DataLoader):
            self._waiting.append(one.dataset)
        elif changes.is_metric(one):
            self._add(self._numbered(type(one).__qualname__), {'': one}, '')
        elif not changes.is_ours(one):
            if isinstance(one, torch.optim.Optimizer):
                self._hooks(self._numbered(type(one).__qualname__), one)
            own = changes.attributes(one)
            if own is not None:
                self._waiting += (type(one), *own.values())

    def _dataset(self, one: Any) -> None:
        name, users = self._numbered(type(one).__qualname__), changes.attributes(one) is not None
        self.datasets[name] = one
        for key, value in [*getattr(one, '__dict__', {}).items()]:
            # What else it has may be a cache.
            if f'{name}.{key}' in self._kept or (users and isinstance(value, changes.SCALARS)):
                self._add(f'{name}.{key}', one, key)
            elif isinstance(value, Dataset):
                self._waiting.append(value)

    def _function(self, one: FunctionType) -> None:
        within = one.__qualname__.rpartition('.<locals>.')[0]
        name = self._numbered(one.__qualname__)
        for variable, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            if within not in self._around:
                self._add(f'{name}:{variable}', cell, variable)
        for key in [key for key in vars(one) if not key.startswith('__')]:
            self._add(f'{name}.{key}', one, key)
        defaults = *(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()
        self._given(f'{name}:default', defaults)
        self._globals(one.__code__, one.__globals__)

    def _hooks(self, path: str, one: Any) -> None:
        """What is called in passes or steps of a module, parameter or optimizer."""
        names = _OF_TENSORS if isinstance(one, torch.Tensor) else getattr(one, '__dict__', ())
        its = {name: getattr(one, name) for name in names if name.endswith('_hooks')}
        for name, hooks in its.items():  # packages have lists of such names
            self._given(f'{path}.{name}', [*hooks.values()] if isinstance(hooks, dict) else [])

    def _given(self, name: str, values: Sequence[Any]) -> None:
        self._waiting += values
        for i, value in enumerate(values, 1):
            if isinstance(value, changes.CONTAINERS) or changes.attributes(value) is not None:
                self._add(f'{name} {i}', {'': value}, '')

    def _module(self, path: str, one: Any) -> None:
        self._waiting.append(type(one))
        self._hooks(path, one)
        for name, parameter in one._parameters.items():
            self._hooks(f'{path}.{name}', parameter)
        if changes.is_metric(one):
            self._add(path, {'': one}, '')
        elif hasattr(one, '_enable_compute_groups'):  # a collection, whose metrics share states
            if one._groups_checked:
                one._compute_groups_create_state_ref(copy=True)
            one._enable_compute_groups = one._groups_checked = False
        if not changes.is_users_class(type(one).__module__):
            self._libraries.append((path, one))
        else:
            self.modules[path] = one
            for key, value in [*vars(one).items()]:
                trained = isinstance(value, torch.Tensor) and value.requires_grad
                counts = changes.may_be_saved(value) or seeding(value) is not None
                if counts and not (key in OF_TORCH or trained):
                    self._add(f'{path}.{key}', one, key)

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
def _names(code: CodeType, stored: bool = False) -> frozenset[str]:
    """Of attributes and global variables; ``stored``: of attributes that are set."""
    inner = [_names(one, stored) for one in code.co_consts if isinstance(one, CodeType)]
    steps = dis.get_instructions(code) if stored else ()
    found = (s.argval for s in steps if s.opname == 'STORE_ATTR')
    return frozenset(found if stored else code.co_names).union(*inner)


def live_names(code: CodeType, at: int) -> frozenset[str]:
    """Variables that may be read from an instruction on; shared ones always count."""
    # In a call, a frame is at the memory of the instruction, which is behind it.
    here = max((offset for offset in _live(code) if offset <= at), default=0)
    return _live(code)[here].union(code.co_cellvars, code.co_freevars)


@lru_cache(maxsize=256)
def _live(code: CodeType) -> dict[int, frozenset[str]]:
    """By the offset of each instruction, the local variables that may be read from it on."""
    steps = list(dis.get_instructions(code))
    place = {step.offset: i for i, step in enumerate(steps)}
    after, uses = list[list[int]](), list[list[tuple[str, Any]]]()
    for i, step in enumerate(steps):
        then = [place[step.argval]] if step.opcode in (*dis.hasjrel, *dis.hasjabs) else []
        if not step.opname.startswith(_ENDS) and i + 1 < len(steps):
            then.append(i + 1)
        after.append(then)
        kinds = re.findall(r'(LOAD|STORE|DELETE)_FAST', step.opname)
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        uses.append([*zip(kinds, names, strict=False)][::-1])
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        for offset in place.keys() & range(entry.start, entry.end):
            after[place[offset]].append(place[entry.target])
    found, before = [frozenset[str]() for _ in steps], list[frozenset[str]]()
    while found != before:
        before = [*found]
        for i in reversed(range(len(steps))):
            now = frozenset().union(*(found[j] for j in after[i]))
            for kind, name in uses[i]:
                now = now | {name} if kind == 'LOAD' else now - {name}
            found[i] = now
    return {step.offset: live for step, live in zip(steps, found, strict=True)}


def names_in_loop(code: CodeType, at: int) -> frozenset[str]:
    """The function's own variables that may go from one iteration of the loop to the next."""
    starts = code.co_code[at] == dis.opmap['FOR_ITER']
    here = next((offset for offset in _live(code) if starts and offset > at), at)
    return live_names(code, here) - {*code.co_cellvars, *code.co_freevars}


def variables(functions: Iterable[Any] = ()) -> dict[str, Any]:
    """By name, the variables of the functions around us, nearest first, and of what they reach."""
    around, found = list(frames()), dict[str, Any]()
    for frame in around:
        found = {**frame.f_locals, **found}
    for place, one in Places(around, functions):
        name = place.name or place.path
        found.setdefault(name if found.get(name, one) is one else place.path, one)
    return found


def of_packages(functions: Sequence[Any]) -> dict[str, Any]:
    """Their objects around us, by path, but not in data and what has a state of its own."""
    others = Dataset, DataLoader, torch.optim.Optimizer
    found, left_out = dict[str, Any](), list[str]()
    for path, one in inside({**variables(functions), 'functions': functions}):
        inner = path.startswith(tuple(left_out))
        if inner or isinstance(one, others) or changes.has_state(one):
            left_out += () if inner else (f'{path}.', f'{path}[')
        elif changes.may_count(one):
            found[path] = one
    return found
