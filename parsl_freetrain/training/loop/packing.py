"""Values of variables in a form that checkpoints hold, and back."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
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
    """``live``: tensors that are saved already, of which the number is packed; ``known``: objects
    that are saved already; ``find``: the class of a name, by which objects in containers are made.
    """

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
    """A value in a form that checkpoints hold, without the ``unchanged`` attributes of an object.
    ``room``: elements and bytes that there may be, of which those that there are are taken off.
    Of objects and dicts that the function makes again, it is what can be saved; otherwise it raises
    NotPlain.
    """
    live, numbers, around = how.live, dict[int, int](), set[int]()
    room = [_MOST, _MOST_BYTES] if room is None else room

    def tensor(one: torch.Tensor) -> Any:
        if not numbers:
            numbers.update(
                (t.data_ptr(), i) for i, t in enumerate(live) if is_plain(t) and t.numel()
            )
        if is_plain(one) and one.data_ptr() in numbers:
            i = numbers[one.data_ptr()]
            if one.shape != live[i].shape:
                raise NotPlain('a part of a model')
            return 'live', i, one is live[i]
        if one.is_leaf and one.requires_grad:
            raise NotPlain('a tensor that is trained')
        plain = one.detach().clone()
        return plain if plain.device.type == 'cpu' else ('device', plain)

    def container(one: Any, there: bool) -> Any:
        kind, inner = type(one), one.values() if isinstance(one, dict) else one
        plain = _SCALARS.issuperset(map(type, inner))
        take(len(one) if plain else 0, 0)
        if isinstance(one, dict):
            found = dict(one) if plain else parts(one, there)
            plain_kind = kind if kind in (OrderedDict, Counter) else dict
            return 'dict' if len(found) == len(one) else 'items', plain_kind(found)
        values = [*inner] if plain else [*map(pack, inner)]
        if isinstance(one, deque):
            return 'deque', values, one.maxlen
        if kind not in (list, set, tuple):
            raise NotPlain(f'a {kind.__name__}')
        return kind.__name__, values

    def parts(named: dict[Any, Any], there: bool, objects: bool = False) -> dict[Any, Any]:
        found = {}
        for key, value in named.items():
            try:
                found[key] = pack(value, objects)
            except TooLarge:
                raise
            except NotPlain:
                if not there:
                    raise
        return found

    def take(elements: int, size: int) -> None:
        room[0], room[1] = room[0] - elements, room[1] - size
        if min(room) < 0:
            raise TooLarge(f'more than {_MOST:,} elements or {_MOST_BYTES >> 30} GiB')

    def pack(one: Any, there: bool = False) -> Any:
        take(1, one.nbytes if isinstance(one, (torch.Tensor, np.ndarray)) else 0)
        if type(one) in _SCALARS:
            return one
        if isinstance(one, torch.Tensor):
            return tensor(one)
        if isinstance(one, np.ndarray) and one.dtype.kind in 'biufc':
            return 'numpy', torch.from_numpy(one.copy())
        if isinstance(one, np.generic):
            return pack(one.item())
        if id(one) in around:
            raise NotPlain('what refers to itself')
        around.add(id(one))
        try:
            if isinstance(one, CONTAINERS):
                return container(one, there)
            return thing(one, there)
        finally:
            around.remove(id(one))

    def thing(one: Any, there: bool) -> Any:
        top, name, own = around == {id(one)}, type(one).__name__, attributes(one)
        kept = top or (there and not isinstance(one, torch.nn.Module))
        if has_state(one) and kept and id(one) not in how.known:
            return 'state', pack(one.state_dict())
        if own is None or has_state(one) or isinstance(one, (Dataset, torch.nn.Module)):
            raise NotPlain(f'a {name}')
        if not there and how.find(name) is not type(one):
            raise NotPlain(f'a {name}')
        changed = {key: value for key, value in own.items() if not (top and key in unchanged)}
        return 'object', parts(changed, there, there), name

    return pack(one, True)


def unpacked(packed: Any, now: Any, how: How) -> Any:
    """The value, in the place of ``now`` where that is of its kind: others may refer to it."""

    def unpack(packed: Any, now: Any = None) -> Any:
        if isinstance(packed, torch.Tensor):
            kind = packed.shape, packed.dtype
            alike = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == kind
            taken = alike and not (now.requires_grad or now.is_inference())
            return now.copy_(packed) if taken else packed.clone()
        if not isinstance(packed, tuple):
            return packed
        kind, inner = packed[:2]
        if kind == 'live':
            return how.live[inner] if packed[2] else how.live[inner].detach()
        if kind == 'device':
            return unpack(inner, now).to(how.device)
        if kind == 'numpy':
            array = inner.numpy()
            if isinstance(now, np.ndarray) and (now.shape, now.dtype) == (array.shape, array.dtype):
                now[...] = array
                return now
            return array.copy()
        if kind == 'state':
            if has_state(now):
                now.load_state_dict(unpack(inner))
            return now
        if kind == 'object':
            made = attributes(now) is None
            one = object.__new__(how.find(packed[2])) if made else now
            for key, value in inner.items():
                if made or key in vars(one):
                    object.__setattr__(one, key, unpack(value, vars(one).get(key)))
            return one
        if kind == 'items':
            for key, value in inner.items() if isinstance(now, dict) else ():
                now[key] = unpack(value, now.get(key))
            return now
        if kind == 'dict':
            new = type(inner)({key: unpack(one) for key, one in inner.items()})
            if isinstance(now, dict):
                now.clear()
                now.update(new)
                return now
            return new
        values = [*map(unpack, inner)]
        if isinstance(now, (list, deque)) and kind in ('list', 'deque'):
            now.clear()
            now.extend(values)
            return now
        if kind == 'deque':
            return deque(values, packed[2])
        return values if kind == 'list' else tuple(values) if kind == 'tuple' else set(values)

    return unpack(packed, now)
