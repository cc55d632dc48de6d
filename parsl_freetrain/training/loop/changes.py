"""What shows that a value has changed, and whether a checkpoint may hold it."""

from __future__ import annotations

import hashlib
import marshal
import pickle
import sys
import sysconfig
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from parsl_freetrain.training.data.inside import fingerprint

SCALARS = (bool, int, float, str, bytes, type(None))
LIBRARIES = tuple(sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib'))
COPIED = 20_000, 2**24  # elements and bytes of all variables that are copied after each batch
_LOOKED_AT = 10**6, 2**30  # of a variable of which all is looked at, else some
_OTHERS = {*sys.stdlib_module_names, 'parsl_freetrain'} - {'__main__'}
_NUMBERS = {bool, int, float, type(None)}
CONTAINERS = dict, list, set, tuple, deque
_PLAIN = *CONTAINERS, Counter, OrderedDict, defaultdict


def is_ours(one: Any) -> bool:
    return type(one).__module__.startswith('parsl_freetrain.')


def has_state(one: Any) -> bool:
    if isinstance(one, (type, DataLoader, torch.optim.Optimizer, torch.amp.GradScaler)):
        return False
    return callable(getattr(one, 'state_dict', None)) and hasattr(one, 'load_state_dict')


def attributes(one: Any) -> dict[str, Any] | None:
    """The attributes of an object of a user's own class; None: it is another one."""
    module = type(one).__module__
    file = getattr(sys.modules.get(module), '__file__', None) or ''
    others = file.startswith(LIBRARIES) or module.partition('.')[0] in _OTHERS
    plain = not others or isinstance(one, (SimpleNamespace, Namespace))
    return vars(one) if plain and hasattr(one, '__dict__') else None


def mark(one: Any, depth: int = 4) -> Any:
    """It differs where an object has changed: of plain containers and arrays all counts."""
    if isinstance(one, SCALARS):
        return one if one == one else 'nan'
    if isinstance(one, torch.Tensor):
        return id(one), 0 if one.is_inference() else one._version
    all_of = depth < 4 or not is_large(one, _LOOKED_AT)
    if isinstance(one, np.ndarray) and one.dtype != object and all_of:
        return id(one), one.shape, hashlib.blake2b(one.tobytes(), digest_size=16).digest()
    if type(one) in _PLAIN and depth and all_of:
        plainly = list(one) if type(one) is deque else dict(one) if isinstance(one, dict) else one
        with suppress(ValueError):  # version 2 does not depend on what else refers to it
            return id(one), hashlib.blake2b(marshal.dumps(plainly, 2), digest_size=16).digest()
        plain = *SCALARS, *CONTAINERS, torch.Tensor, np.ndarray
        inner = one.values() if isinstance(one, dict) else one
        marks = [mark(value, depth - 1) for value in inner if isinstance(value, plain)]
        return id(one), len(one), fingerprint(one=one), marks
    if isinstance(one, Iterator) and depth and attributes(one) is None:
        frame = getattr(one, 'gi_frame', None)
        with suppress(Exception):
            inner = [frame.f_lasti, *frame.f_locals.values()] if frame else [pickle.dumps(one)]
            return id(one), [mark(each, depth - 1) for each in inner]
        return id(one), 0
    if depth and not has_state(one) and (own := attributes(one)) is not None:
        objects = {key for key, value in own.items() if attributes(value) is not None}
        return {
            key: mark(value, depth - (key in objects or all_of))
            for key, value in own.items()
            if not ((key in objects and has_state(value)) or is_ours(value))
        }
    return id(one), fingerprint(one=one.state_dict() if has_state(one) else one)


def may_be_saved(one: Any) -> bool:
    """Whether it is of a kind that checkpoints hold; what it holds may not be."""
    kinds = *SCALARS, *CONTAINERS, torch.Tensor, np.ndarray, np.generic
    return isinstance(one, kinds) or has_state(one) or attributes(one) is not None


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
        if {*map(type, inner)} <= _NUMBERS:
            left[0] -= len(inner)
            return False
        return any(takes(value, depth - 1) for value in inner)

    return takes(one, 5)
