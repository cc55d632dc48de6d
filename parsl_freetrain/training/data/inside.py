"""What is in the user's own objects: datasets, functions, and the variables around a loop."""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import PurePath
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_DEPTH, _ITEMS, _MOST, _SHOWN = 8, 64, 20_000, 16
_KEYS = (str, bytes, int, float, type(None))
_PLAIN = *_KEYS, complex, torch.Tensor, PurePath, type, ModuleType, CodeType

Looks = dict[str, list[Any]]  # some of the numbers and texts in a dataset, by where they are


def inside(named: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All in named objects, once, by path; of long containers the first items, no models."""
    seen: set[int] = set()
    waiting = deque((name, value, 0) for name, value in named.items())
    while waiting and len(seen) < _MOST:
        path, value, depth = waiting.popleft()
        ours = type(value).__module__.startswith('parsl_freetrain.')
        if ours or isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if depth < _DEPTH:
            waiting.extend((f'{path}{at}', one, depth + 1) for at, one in parts_of(value))


def parts_of(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        try:
            items = _first(value.items())
        except Exception:  # of a configuration (omegaconf) in which values are missing
            return ()
        # The text of another key may be long, or be read from a device: an optimizer has tensors.
        return [(f'[{k!r}]' if isinstance(k, _KEYS) else f'[{type(k)!r}]', one) for k, one in items]
    if isinstance(value, (list, tuple, deque)):
        return [(f'[{i}]', one) for i, one in enumerate(_first(value))]
    if isinstance(value, (set, frozenset)):
        return [('{}', one) for one in _first(value)]
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
    if hasattr(type(value), 'skip') and hasattr(type(value), '__iter__'):
        return ()  # a stream that finds any place by itself: its generators are its own
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
    found += _globals_of(function.__code__, function.__globals__)
    return found


def _globals_of(code: CodeType, its: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The global variables that code names, and of functions only those of its own module."""
    found = []
    for name in code.co_names:
        value = its.get(name)
        if isinstance(value, FunctionType) and value.__globals__ is not its:
            continue
        if value is not None and not isinstance(value, _PLAIN):
            found.append((f'.{name}', value))
    return found


def fingerprint(**named: Any) -> bytes:
    """It changes when what these objects hold is set to something else."""
    digest = hashlib.blake2b(digest_size=16)
    for path, one in inside(named):
        size = len(one) if isinstance(one, (list, tuple, Mapping)) else 0
        digest.update(f'{path} {id(one)} {size}'.encode())
        for at, leaf in parts_of(one):
            if isinstance(leaf, torch.Tensor):
                said = f'{id(leaf)} {leaf._version if not leaf.is_inference() else 0}'
            else:
                said = repr(leaf) if isinstance(leaf, (str, bytes, int, float)) else ''
            digest.update(f'{at} {said}'.encode())
        if isinstance(one, np.ndarray) and one.dtype != object and one.flags.c_contiguous:
            digest.update(_spread(one.reshape(-1)).tobytes())
    return digest.digest()


def looks_of(dataset: Any) -> Looks:
    """What tells a dataset from another, as lists and tensors; of paths the last part."""
    found: Looks = {}
    for path, one in inside({'dataset': dataset}):
        if len(found) >= _SHOWN:
            break
        if '{' in path or 'cache' in path.lower():  # sets have another order in each process
            continue
        if isinstance(one, np.ndarray) and one.dtype != object and one.flags.c_contiguous:
            found[path] = _spread(one.reshape(-1)).tolist()
        plain: list[Any] = []
        for at, leaf in parts_of(one):
            if isinstance(leaf, torch.Tensor):
                plainly = leaf.device.type == 'cpu' and leaf.layout is torch.strided
                if plainly and leaf.is_contiguous() and 'cache' not in at:
                    found[path + at] = _spread(leaf.detach().reshape(-1)).tolist()
            elif isinstance(one, (list, tuple)) and isinstance(leaf, (int, np.integer)):
                plain.append(int(leaf))
            elif isinstance(one, (list, tuple)) and isinstance(leaf, (str, PurePath)):
                plain.append(PurePath(leaf).name)
        if plain:
            found[path] = plain[:_SHOWN]
    return {path: said for path, said in found.items() if said and all(map(_is_plain, said))}


def different(one: Looks, other: Looks) -> str:
    """Where they differ, in a sentence; empty: nowhere. Floats may be rounded differently."""
    for path in one.keys() & other.keys():
        for this, that in zip(one[path], other[path], strict=False):
            near = isinstance(this, float) and isinstance(that, float)
            if this != that and not (near and math.isclose(this, that, rel_tol=1e-3, abs_tol=1e-6)):
                return f'{path} has {this!r} and {that!r}'
    return ''


def _is_plain(one: Any) -> bool:
    return isinstance(one, (str, int)) or (isinstance(one, float) and math.isfinite(one))


def _spread(flat: Any) -> Any:
    return flat[:: len(flat) // _SHOWN or 1][:_SHOWN]
