"""Random number generators of the user's own, in datasets, samplers, functions and variables."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_DEPTH, _ITEMS, _MOST = 8, 64, 20_000
_PLAIN = (str, bytes, int, float, complex, type(None), torch.Tensor, type, ModuleType, CodeType)


class OwnGenerators:
    """Those of this process that are known, by where they were found. They are seeded wherever
    torch's own generator is, so what they draw depends on nothing else either.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Any, Callable[[int], object]]] = {}

    def find(self, where: Mapping[str, Any]) -> list[str]:
        """Look for generators in named objects, and know them. Returns the names of new ones."""
        new = []
        for name, value in inside(where):
            seed = _seeding(value)
            if seed is not None and id(value) not in self._known:
                self._known[id(value)] = name, value, seed
                new.append(name)
        return new

    def seed(self, seed: int) -> None:
        """Seed each of them by ``seed`` and its name."""
        for name, _, seed_it in self._known.values():
            text = f'{seed}:{name}'.encode()
            seed_it(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1)

    def forget(self) -> None:
        """Know none, as at the beginning of a fragment."""
        self._known.clear()


own_generators = OwnGenerators()


def _seeding(value: Any) -> Callable[[int], object] | None:
    """How it is seeded; None: it is no generator, or one that :func:`seed_everything` seeds."""
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else value.manual_seed
    if isinstance(value, random.Random):
        shared = value is getattr(random, '_inst', None) or isinstance(value, random.SystemRandom)
        return None if shared else value.seed
    numpy = sys.modules.get('numpy.random')
    if numpy is None:
        return None
    if isinstance(value, numpy.Generator):
        bits = value.bit_generator

        def seed_bits(seed: int) -> None:
            bits.state = type(bits)(seed).state

        return seed_bits
    if isinstance(value, numpy.RandomState) and value is not numpy.mtrand._rand:
        return lambda seed: value.seed(seed % 2**32)
    return None


def inside(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All that is in named objects, each once, by a path: items, attributes, and what functions
    refer to. Of long containers it is the first items. Models are not looked into.
    """
    seen: set[int] = set()
    waiting = deque((name, value, 0) for name, value in named.items())
    while waiting and len(seen) < _MOST:
        path, value, depth = waiting.popleft()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if depth < _DEPTH:
            waiting.extend((f'{path}{at}', one, depth + 1) for at, one in parts_of(value))


def parts_of(value: Any) -> Iterable[tuple[str, Any]]:
    """What an object refers to, by how it is reached."""
    if isinstance(value, Mapping):
        return [(f'[{key!r}]', one) for key, one in _first(value.items())]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(f'[{i}]', one) for i, one in enumerate(_first(value))]
    if isinstance(value, BuiltinMethodType):
        return [('', value.__self__)]
    if isinstance(value, MethodType):
        return [('', value.__self__), ('()', value.__func__)]
    if isinstance(value, partial):
        return [('', value.func), ('()', value.args), ('()', value.keywords)]
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, torch.nn.Module) and next(value.parameters(), None) is not None:
        return ()
    found = [(f'.{key}', one) for key, one in getattr(value, '__dict__', {}).items()]
    kinds = type(value).__mro__
    for kind in kinds:
        slots = kind.__dict__.get('__slots__', ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot):
                found.append((f'.{slot}', getattr(value, slot)))
    for name in ('__getitem__', '__getitems__', '__iter__', '__call__', 'forward'):
        own = next((kind.__dict__[name] for kind in kinds if name in kind.__dict__), None)
        if isinstance(own, FunctionType):
            found.append((f'.{name}', own))
    return found


def _first(items: Iterable[Any]) -> list[Any]:
    return list(islice(items, _ITEMS))


def _of_function(function: FunctionType) -> list[tuple[str, Any]]:
    found = [('()', one) for one in (function.__defaults__ or ())]
    found += [('()', one) for one in (function.__kwdefaults__ or {}).values()]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            found.append((f'.{name}', cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    found += globals_of(function.__code__, function.__globals__)
    return found


def globals_of(code: CodeType, its: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The global variables that code names, and of functions only those of its own module."""
    found = []
    for name in code.co_names:
        value = its.get(name)
        if isinstance(value, FunctionType) and value.__globals__ is not its:
            continue
        if value is not None and not isinstance(value, _PLAIN):
            found.append((f'.{name}', value))
    return found


def variables_of(frame: FrameType) -> dict[str, Any]:
    """The variables that the code of a frame names."""
    named = {name[1:]: one for name, one in globals_of(frame.f_code, frame.f_globals)}
    return {**named, **frame.f_locals}
