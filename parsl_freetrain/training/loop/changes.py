"""What shows that a value has changed, and whether a checkpoint may hold it."""

import hashlib
import marshal
import math
import pickle
import sys
import sysconfig
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdRef

from parsl_freetrain.training.data.inside import fingerprint

SCALARS = (bool, int, float, str, bytes, type(None))
COPIED = 20_000, 2**24  # elements and bytes of all variables that are copied after each batch
_LOOKED_AT = 10**6, 2**30  # of a variable of which all is looked at, else some
_OTHERS = {*sys.stdlib_module_names, 'parsl_freetrain'} - {'__main__'}
_PYTHON = sysconfig.get_path('stdlib')
_OF_PROCESS = {'_io', '_thread', '_socket', '_queue', 'threading', 'socket', 'queue', 'subprocess'}
CONTAINERS = dict, list, set, tuple, deque
VALUES = complex, range, frozenset, Decimal, Fraction, date, time, timedelta, PurePath, Enum
FUNCTIONS = FunctionType, BuiltinFunctionType
KINDS = *SCALARS, *CONTAINERS, *VALUES, torch.Tensor, np.ndarray, np.generic  # checkpoints hold


def is_library(file: str) -> bool:
    """Whether a file is of Python or an installed package; environments may build on others."""
    return '/site-packages/' in file or '/dist-packages/' in file or file.startswith(_PYTHON)


def is_ours(one: Any) -> bool:
    return type(one).__module__.startswith('parsl_freetrain.')


def is_metric(one: Any) -> TypeGuard[Any]:
    """Whether a package's object adds up over batches (torchmetrics, torcheval, MONAI, ignite)."""
    return _adds_up(type(one))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _adds_up(kind: Any) -> bool:
    if issubclass(kind, torch.nn.Module):
        named = (k for k in kind.__mro__ if k.__name__ == 'Metric')
        return any(k.__module__.startswith('torchmetrics') for k in named)
    does = callable(getattr(kind, 'reset', None)), hasattr(kind, 'compute')
    return does[0] and (does[1] or hasattr(kind, 'aggregate')) and any(map(is_package, kind.mro()))


def state_of(one: Any) -> Any:
    """What is saved of it: metrics leave nearly all out of their ``state_dict``, or have none."""
    if not is_metric(one):
        return one.state_dict()
    if hasattr(type(one), 'metric_state'):
        return {**one.metric_state, '_update_count': one._update_count}
    return {name: value for name, value in vars(one).items() if _is_sum(value)}


def _is_sum(value: Any) -> bool:
    """Whether a metric may add up in it: numbers, tensors, and containers of them."""
    if isinstance(value, dict):
        return all(map(_is_sum, value.values()))
    last = value[-1] if isinstance(value, list) and value else None  # all are alike
    return isinstance(value, (list, torch.Tensor, *SCALARS)) and (last is None or _is_sum(last))


def load_state(one: Any, state: Any) -> None:
    if not is_metric(one):
        one.load_state_dict(state)
        return
    for name, value in (*state.items(), ('_computed', None)):
        setattr(one, name, value)


def has_state(one: Any) -> bool:
    if isinstance(one, (type, DataLoader, torch.optim.Optimizer, torch.amp.GradScaler)):
        return False
    with suppress(Exception):  # of a __getattr__ that takes no other names
        saves = callable(getattr(one, 'state_dict', None)) and hasattr(one, 'load_state_dict')
        return saves or is_metric(one)
    return False


def has_own_state(one: Any) -> bool:
    return has_state(one) and not (isinstance(one, torch.nn.Module) or is_metric(one))


def tensors_in(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """By path, those in objects with a state, in the user's own, and in containers."""
    found: dict[str, torch.Tensor] = {}
    for name, one in named.items():
        how = {'keep_vars': True} if isinstance(one, torch.nn.Module) else {}
        held = one.state_dict(**how) if has_state(one) else attributes(one) or one
        inner = tree_flatten_with_path(held)[0]
        found |= {f'{name}{keystr(at)}': t for at, t in inner if isinstance(t, torch.Tensor)}
    return found


@lru_cache(maxsize=4096)
def is_users_class(module: str) -> bool:
    """Whether a module, by its name, is the user's, and so its classes."""
    file = getattr(sys.modules.get(module), '__file__', None) or ''
    return not (is_library(file) or module.partition('.')[0] in _OTHERS)


@lru_cache(maxsize=4096)
def is_package(kind: Any) -> bool:
    """Whether a class is of an installed package, but not torch."""
    others = kind.__module__.partition('.')[0] in _OTHERS | {'torch'}
    return not (others or is_users_class(kind.__module__))


def may_count(one: Any) -> bool:
    """Whether a package's object may have numbers that are state: it is not large and has no files,
    threads or connections, whose numbers are those of this process.
    """
    own = getattr(one, '__dict__', {}) if is_package(type(one)) else {}  # type: ignore[arg-type]
    of = {type(value).__module__.partition('.')[0] for value in [*own.values()]}
    # A proxy (wandb) has another object's.
    return type(own) is dict and bool(own) and not (of & _OF_PROCESS or is_large(own, _LOOKED_AT))


@lru_cache(maxsize=4096)
def slots(kind: Any) -> tuple[str, ...] | None:
    """The slots of a user's own class; None: it is another one."""
    users = is_users_class(kind.__module__) or issubclass(kind, (SimpleNamespace, Namespace))
    if not users or issubclass(kind, (type, Enum)):
        return None
    slots = [vars(each).get('__slots__', ()) for each in kind.__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    found = tuple(name for name in names if name not in ('__dict__', '__weakref__'))
    return found if found or kind.__dictoffset__ else None


def attributes(one: Any) -> dict[str, Any] | None:
    """The attributes of an object of a user's own class; None: it is another one."""
    kind: Any = type(one)
    named = slots(kind)
    if not named:
        return None if named is None else vars(one)
    own = {name: getattr(one, name) for name in named if hasattr(one, name)}
    return {**own, **getattr(one, '__dict__', {})}


def mark(one: Any, depth: int = 4) -> Any:
    """It differs where an object has changed: of plain containers and arrays all counts."""
    if isinstance(one, SCALARS):
        return one if one == one else 'nan'
    if isinstance(one, torch.Tensor):  # ids are used again, and copies have the same version
        return WeakIdRef(one), 0 if one.is_inference() else one._version
    if isinstance(one, torch.nn.Module):
        held = tree_leaves(state_of(one)) if is_metric(one) else []
        names = [name for name, _ in one.named_modules()]
        return WeakIdRef(one), names, [mark(t) for t in (*one.parameters(), *one.buffers(), *held)]
    if isinstance(one, VALUES):
        return repr(one)
    if isinstance(one, FUNCTIONS):
        return id(one), b''
    if isinstance(one, np.ndarray) and one.dtype != object:
        return id(one), one.shape, _digest_of_array(one)
    own = None if has_state(one) else attributes(one)
    if isinstance(one, CONTAINERS) and depth:
        more = [mark(own, depth - 1)] if own else []
        with suppress(ValueError):
            return id(one), _digest(one), *more
        inner = [*one.values()] if isinstance(one, dict) else [*one]
        ids = array('Q', map(id, inner)).tobytes()
        if depth == 4 and is_large(one, _LOOKED_AT):
            return id(one), ids, *more
        plain = *SCALARS, *CONTAINERS, torch.Tensor, np.ndarray
        marks = [mark(value, depth - 1) for value in inner if isinstance(value, plain)]
        return id(one), ids, fingerprint(one=one), marks, *more
    if isinstance(one, Iterator) and depth and own is None:
        frame = getattr(one, 'gi_frame', None)
        with suppress(Exception):
            inner = [frame.f_lasti, *frame.f_locals.values()] if frame else [pickle.dumps(one)]
            return id(one), [mark(each, depth - 1) for each in inner]
        return id(one), 0
    if depth and own is not None:
        objects = {key for key, value in own.items() if attributes(value) is not None}
        all_of = depth < 4 or not is_large(one, _LOOKED_AT)
        return {
            key: mark(value, depth - (key in objects or all_of))
            for key, value in own.items()
            if not ((key in objects and has_state(value)) or is_ours(value))
        }
    if is_data(one):
        # An xarray Dataset makes its arrays whenever it is asked for them: their ids say nothing.
        parts = [*one.values()] if isinstance(one, Mapping) else [one]
        with suppress(Exception):
            small = [part for part in parts if math.prod(part.shape) < _LOOKED_AT[0]]
            if small or isinstance(one, Mapping):
                return id(one), [*map(_digest_of_table, small)]
    return id(one), fingerprint(one=state_of(one) if has_state(one) else one)


def same_elements(then: Any, now: Any) -> set[int]:
    """The ids of containers, in two marks of an object, that have the elements that they had."""
    both = isinstance(then, dict) and isinstance(now, dict)
    pairs = [(then.get(key), now[key]) for key in now] if both else [(then, now)]
    tuples = [both for both in pairs if {*map(type, both)} == {tuple}]
    return {now[0] for then, now in tuples if type(now[0]) is int and then[:2] == now[:2]}


def _digest(one: Any) -> bytes:
    """Of a container of plain values, in parts; raises ValueError if it has others."""
    items, digest = iter(one.items() if isinstance(one, dict) else one), hashlib.blake2b()
    while part := [*islice(items, 10**5)]:
        digest.update(marshal.dumps(part, 2))  # version 2 does not depend on what refers to it
    return digest.digest()


def _digest_of_array(one: np.ndarray[Any, Any]) -> bytes:
    if isinstance(one, np.memmap) and not one.flags.writeable:
        return b''
    flat = np.ascontiguousarray(one).reshape(-1).view(np.uint8)
    if flat.nbytes > _LOOKED_AT[1]:  # sums take a tenth of the time
        whole = flat.nbytes // 4096 * 4096
        sums = flat[:whole].view(np.uint64).reshape(-1, 512).sum(1)
        flat = np.concatenate((sums.view(np.uint8), flat[whole:]))
    return hashlib.blake2b(flat.data, digest_size=16).digest()


def _digest_of_table(one: Any) -> Any:
    """Dask, which computes an array when it is read, has a token for what it will be."""
    graph = getattr(one, '__dask_graph__', None)
    if graph is not None and graph() is not None:
        return repr(one.__dask_tokenize__())
    return hashlib.blake2b(pickle.dumps(one)).digest()


def is_data(one: Any) -> bool:
    """Whether it is a table or an array of another library (pandas, PIL, jax)."""
    ours = isinstance(one, (torch.Tensor, np.ndarray, np.generic)) or attributes(one) is not None
    return hasattr(type(one), '__array__') and not ours


def may_be_saved(one: Any) -> bool:
    """Whether it is of a kind that checkpoints hold; what it holds may not be."""
    return isinstance(one, (*KINDS, *FUNCTIONS)) or has_state(one) or attributes(one) is not None


def is_large(one: Any, most: tuple[int, int] = COPIED) -> bool:
    """Whether it takes too long to look at all of it, by default in each batch."""
    left = [*most]

    def takes(one: Any, depth: int) -> bool:
        left[0] -= 1
        left[1] -= one.nbytes if isinstance(one, np.ndarray) else 0
        left[1] -= len(one) if isinstance(one, (str, bytes)) else 0
        inner: Any = ()
        if depth and isinstance(one, CONTAINERS):
            inner = one.values() if isinstance(one, dict) else one
        elif depth and not has_state(one):
            inner = (attributes(one) or {}).values()
        if len(inner) > left[0] or min(left) < 0:
            return True
        if {*map(type, inner)} <= {bool, int, float, type(None)}:
            left[0] -= len(inner)
            return False
        return any(takes(value, depth - 1) for value in [*inner])  # looking may load some

    return takes(one, 5)
