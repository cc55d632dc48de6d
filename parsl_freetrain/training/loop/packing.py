"""Values of variables in a form that checkpoints hold, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from parsl_freetrain.training.loop.changes import CONTAINERS, SCALARS, attributes, has_state
from parsl_freetrain.training.steps.buffers import is_plain

_SCALARS = frozenset(SCALARS)
_MOST, _MOST_BYTES = 10**7, 2**34  # elements and bytes of what is saved of a variable


@dataclass
class How:
    """``live``: tensors saved as numbers; ``known``: saved objects; ``find``: classes by name."""

    live: list[torch.Tensor]
    known: set[int]
    find: Callable[[str], Any]
    device: torch.device


class NotPlain(Exception):
    """Says what it is that cannot be saved."""


class TooLarge(NotPlain):
    pass


def packed(
    one: Any, how: How, unchanged: Collection[str] = (), room: list[int] | None = None
) -> Any:
    """A value as checkpoints hold it, without ``unchanged`` attributes, within ``room`` (elements,
    bytes); NotPlain if it cannot be saved and is not made again.
    """
    room = [_MOST, _MOST_BYTES] if room is None else room
    return _Packer(how, unchanged, room).pack(one, True)


class _Packer:
    """What :func:`packed` does, with what it knows of one value."""

    def __init__(self, how: How, unchanged: Collection[str], room: list[int]) -> None:
        self._how, self._unchanged, self._room = how, unchanged, room
        self._numbers, self._around = dict[int, int](), set[int]()

    def _tensor(self, one: torch.Tensor) -> Any:
        if not self._numbers:
            self._numbers.update(
                (t.data_ptr(), i) for i, t in enumerate(self._how.live) if is_plain(t) and t.numel()
            )
        if is_plain(one) and one.data_ptr() in self._numbers:
            i = self._numbers[one.data_ptr()]
            if one.shape != self._how.live[i].shape:
                raise NotPlain('a part of a model')
            return 'live', i, one is self._how.live[i]
        if one.is_leaf and one.requires_grad:
            raise NotPlain('a tensor that is trained')
        plain = one.detach().clone()
        return plain if plain.device.type == 'cpu' else ('device', plain)

    def _container(self, one: Any, there: bool) -> Any:
        kind, inner = type(one), one.values() if isinstance(one, dict) else one
        plain = _SCALARS.issuperset(map(type, inner))
        self._take(len(one) if plain else 0, 0)
        if isinstance(one, dict):
            found = dict(one) if plain else self._parts(one, there)
            plain_kind = kind if kind in (OrderedDict, Counter) else dict
            return 'dict' if len(found) == len(one) else 'items', plain_kind(found)
        values = [*inner] if plain else [*map(self.pack, inner)]
        if isinstance(one, deque):
            return 'deque', values, one.maxlen
        if kind not in (list, set, tuple):
            raise NotPlain(f'a {kind.__name__}')
        return kind.__name__, values

    def _parts(self, named: dict[Any, Any], there: bool, objects: bool = False) -> dict[Any, Any]:
        found = {}
        for key, value in named.items():
            try:
                found[key] = self.pack(value, objects)
            except TooLarge:
                raise
            except NotPlain:
                if not there:
                    raise
        return found

    def _take(self, elements: int, size: int) -> None:
        self._room[0], self._room[1] = self._room[0] - elements, self._room[1] - size
        if min(self._room) < 0:
            raise TooLarge(f'more than {_MOST:,} elements or {_MOST_BYTES >> 30} GiB')

    def pack(self, one: Any, there: bool = False) -> Any:
        self._take(1, one.nbytes if isinstance(one, (torch.Tensor, np.ndarray)) else 0)
        if type(one) in _SCALARS:
            return one
        if isinstance(one, torch.Tensor):
            return self._tensor(one)
        if isinstance(one, np.ndarray) and one.dtype.kind in 'biufc':
            return 'numpy', torch.from_numpy(one.copy())
        if isinstance(one, np.generic):
            return self.pack(one.item())
        if id(one) in self._around:
            raise NotPlain('what refers to itself')
        self._around.add(id(one))
        try:
            if isinstance(one, CONTAINERS):
                return self._container(one, there)
            return self._thing(one, there)
        finally:
            self._around.remove(id(one))

    def _thing(self, one: Any, there: bool) -> Any:
        top, name, own = self._around == {id(one)}, type(one).__name__, attributes(one)
        kept = top or (there and not isinstance(one, torch.nn.Module))
        if has_state(one) and kept and id(one) not in self._how.known:
            return 'state', self.pack(one.state_dict())
        if own is None or has_state(one) or isinstance(one, (Dataset, torch.nn.Module)):
            raise NotPlain(f'a {name}')
        if not there and self._how.find(name) is not type(one):
            raise NotPlain(f'a {name}')
        changed = {key: value for key, value in own.items() if not (top and key in self._unchanged)}
        return 'object', self._parts(changed, there, there), name


def unpacked(packed: Any, now: Any, how: How) -> Any:
    """The value, in the place of ``now`` if of its kind, as others may refer to it."""
    return _Unpacker(how).unpack(packed, now)


class _Unpacker:
    """What :func:`unpacked` does, with what it knows of one value."""

    def __init__(self, how: How) -> None:
        self._how, self._used = how, set[int]()

    def unpack(self, packed: Any, now: Any = None) -> Any:
        if isinstance(packed, torch.Tensor):
            kind = packed.shape, packed.dtype
            alike = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == kind
            taken = alike and not (now.requires_grad or now.is_inference() or self._is_live(now))
            return now.copy_(packed) if taken else packed.clone()
        if not isinstance(packed, tuple):
            return packed
        kind, inner = packed[:2]
        if kind == 'live':
            return self._how.live[inner] if packed[2] else self._how.live[inner].detach()
        if kind == 'device':
            return self.unpack(inner, now).to(self._how.device)
        if kind == 'numpy':
            array = inner.numpy()
            if isinstance(now, np.ndarray) and (now.shape, now.dtype) == (array.shape, array.dtype):
                now[...] = array
                return now
            return array.copy()
        if kind == 'state':
            if has_state(now):
                now.load_state_dict(self.unpack(inner))
            return now
        if kind == 'object':
            return self._object(inner, now, packed[2])
        if kind == 'items':
            for key, value in inner.items() if isinstance(now, dict) else ():
                now[key] = self.unpack(value, now.get(key))
            return now
        return self._container(packed, now)

    def _is_live(self, one: torch.Tensor) -> bool:
        """Whether it is, or is a part of, what is trained."""
        live = (t.data_ptr() for t in self._how.live if is_plain(t))
        return is_plain(one) and one.data_ptr() in live

    def _object(self, inner: dict[str, Any], now: Any, name: str) -> Any:
        made = attributes(now) is None
        one = object.__new__(self._how.find(name)) if made else now
        for key, value in inner.items():
            if key in vars(one) or type(one).__name__ == name:
                object.__setattr__(one, key, self.unpack(value, vars(one).get(key)))
        return one

    def _inner(self, packed: Any, now: Any) -> Any:
        """A tensor or array in a container may be anybody's, and a thing be there twice."""
        kind = packed[2] if isinstance(packed, tuple) and packed[0] == 'object' else ''
        same = type(now).__name__ == kind if kind else isinstance(now, CONTAINERS)
        taken = same and id(now) not in self._used
        self._used.add(id(now))
        return self.unpack(packed, now if taken else None)

    def _container(self, packed: Any, now: Any) -> Any:
        kind, inner = packed[:2]
        if kind == 'dict':
            old = now if isinstance(now, dict) else {}
            new = type(inner)({key: self._inner(one, old.get(key)) for key, one in inner.items()})
            if not isinstance(now, dict):
                return new
            now.clear()
            now.update(new)
            return now
        olds = [*now][: len(inner)] if isinstance(now, (list, tuple, deque)) else []
        values = [self._inner(one, old) for one, old in zip_longest(inner, olds)]
        if isinstance(now, (list, deque)) and kind in ('list', 'deque'):
            now.clear()
            now.extend(values)
            return now
        if kind == 'deque':
            return deque(values, packed[2])
        return values if kind == 'list' else tuple(values) if kind == 'tuple' else set(values)
