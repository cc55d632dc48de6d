"""Containers, arrays and tensors that the body of a loop may change in place: as they were."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from operator import is_
from typing import Any

import numpy as np
import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.loop.changes import CONTAINERS

HELD = *CONTAINERS, np.ndarray, torch.Tensor
ITEMS = 64  # of a container of which the inner ones are looked at
_SMALL, _LARGE = 1_000, 10**7  # elements of what is looked at in each step, and in some
_TAIL = 256  # of a list of which the last elements are looked at
_NEARLY = 0.75
_INNER = list, dict, set, deque
_NAMES = int, str, tuple, np.integer  # of samples
Difference = tuple[Any, Any]  # what is gone, and what has come


class Held:
    """A container, an array, or a tensor, as it was. ``copied``: whether it can be put back, and
    ``whole``: all of it is looked at; ``size``: a table by sample has as many entries or more.
    """

    def __init__(self, path: str, one: Any, copied: bool, whole: bool, size: int) -> None:
        self.path, self.one, self._copied, self._size = path, one, copied, size
        self._start = max(0, len(one) - _TAIL) if isinstance(one, list) and not whole else 0
        self._version = one._version if isinstance(one, torch.Tensor) else 0
        self.then, self._lengths = self.now(), _lengths(one) if whole else []
        array = isinstance(one, np.ndarray) and one.dtype.kind in 'biufc'
        rows = copied and (isinstance(one, torch.Tensor) or array) and one.ndim > 0
        self._rows = rows and len(one) >= size
        self.may_be_table = self._rows or isinstance(one, (dict, set, list))

    def now(self) -> Any:
        if not self._copied:
            return None
        if isinstance(self.one, torch.Tensor):
            return self.one.detach().clone()
        if isinstance(self.one, (dict, np.ndarray)):
            return self.one.copy() if isinstance(self.one, np.ndarray) else {**self.one}
        if isinstance(self.one, list):
            return self.one[self._start :]
        return dict.fromkeys(self.one) if isinstance(self.one, set) else [*self.one]

    def changed(self) -> bool:
        """Raises BadInput if it cannot be put back."""
        one, then = self.one, self.then
        if isinstance(one, torch.Tensor):
            differs = one._version != self._version
        elif not self._copied:
            return False
        elif isinstance(one, np.ndarray):
            differs = one.tobytes() != then.tobytes()
        else:
            now = self.now()
            differs = len(now) != len(then) or not all(map(is_, now, then))
            if isinstance(one, dict):
                differs = differs or not all(map(is_, now.values(), then.values()))
            elif self._start and len(one) < self._start:
                self.refuse()
            if self._lengths and self._lengths != _lengths(one)[: len(self._lengths)]:
                self.refuse()  # histories of samples
        if isinstance(one, torch.Tensor) and differs:
            if not self._copied or not (self._rows or one.numel() == 1):
                self.refuse()
            differs = not self._rows or bool(self._changed_rows(one).any())
        return bool(differs)

    def refuse_weights(self, come: Any, names: Collection[str]) -> None:
        """Raises BadInput if what has come to a dict has names of parameters, as averages have."""
        for name in come if isinstance(come, dict) else ():
            if name in names and isinstance(come[name], torch.Tensor):
                self.refuse(f'.{name}')

    def refuse(self, name: str = '') -> None:
        one = self.one[name[1:]] if name else self.one
        raise BadInput(
            f'The body of ctx.loop changed {self.path}{name}, a {type(one).__name__}. It runs once '
            'for each virtual shard, and before the step of the optimizer, so the result would '
            'depend on the nodes: do it in ctx.after_step(fn) or ctx.each_epoch(fn) (a moving '
            'average of weights: ctx.ema; a sum: ctx.report), keep one number or tensor for each '
            'sample, or keep it in a buffer of a module that is given to ctx.prepare, which '
            'becomes the mean over the shards.'
        )

    def put_back(self, is_place: Callable[[Any, Any], bool]) -> None:
        """Set it to what it was, but for numbers that say where training is."""
        then, now = self.then, self.now()
        if isinstance(then, dict):
            then = {k: now[k] if is_place(one, now.get(k)) else one for k, one in then.items()}
        elif isinstance(then, list) and len(then) == len(now):
            then = [n if is_place(one, n) else one for one, n in zip(then, now, strict=True)]
        self._put(then)

    @torch.no_grad()
    def _put(self, content: Any) -> None:
        one: Any = self.one
        if isinstance(one, torch.Tensor):
            one.copy_(content)
            self._version = one._version
        elif isinstance(one, np.ndarray):
            one[...] = content
        elif isinstance(one, dict):
            kind = OrderedDict if isinstance(one, OrderedDict) else dict
            kind.clear(one)
            kind.update(one, content)
        elif isinstance(one, list):
            list.__setitem__(one, slice(self._start, None), content)
        else:
            one.clear()
            one.update(content) if isinstance(one, set) else one.extend(content)

    def _changed_rows(self, now: Any) -> torch.Tensor:
        return (_bits(now) != _bits(self.then)).reshape(len(now), -1).any(1)

    def difference(self) -> Difference:
        """Of its content then and now: what is gone, and what has come; by row, if it has rows."""
        then, now = self.then, self.now()
        if self._rows:
            rows = self._changed_rows(now).nonzero()[:, 0].tolist()
            return [], dict(zip(rows, now[rows].tolist(), strict=True))
        if isinstance(then, dict):
            come = {key: one for key, one in now.items() if then.get(key, self) is not one}
            return [key for key in then if key not in now], come
        if isinstance(self.one, list):
            if not self._start and len(then) == len(now) >= self._size:
                come = {i: one for i, one in enumerate(now) if then[i] is not one}
                if len(come) < len(then):
                    return [], come
            gone = range(max(0, len(then) - len(now)), min(len(then), ITEMS) + 1)
            n = next((n for n in gone if all(map(is_, then[n:], now))), len(then))
            return n, now[len(then) - n :]
        return None, now

    def entries(self, difference: Difference) -> dict[Any, Any]:
        """Those of a difference that may be of single samples."""
        come = difference[1]
        if not (self.may_be_table and isinstance(come, dict)):
            return {}
        there = self.then if isinstance(self.one, set) or len(self.one) < self._size else ()
        return {k: one for k, one in come.items() if isinstance(k, _NAMES) and k not in there}

    @torch.no_grad()
    def take(self, gone: Any, come: Any) -> None:
        one: Any = self.one
        if isinstance(one, set):
            one.difference_update(gone)
            one.update(come)
        elif self._rows:
            kept = isinstance(one, np.ndarray) and np.array([*come.values()], one.dtype)
            one[[*come]] = one.new_tensor([*come.values()]) if kept is False else kept
        elif isinstance(come, dict):
            kind: Any = next(k for k in (OrderedDict, dict, list) if isinstance(one, k))
            for key in gone:
                kind.pop(one, key, None)
            for key, value in come.items():
                kind.__setitem__(one, key, value)
        else:
            self._put(self.then[gone:] + come if isinstance(self.then, list) else come)


def _lengths(one: Any) -> list[int]:
    inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
    found = [len(each) for each in inner if isinstance(each, _INNER)]
    return found if len(found) > ITEMS else []  # of fewer, each is looked at


def _bits(one: Any) -> torch.Tensor:
    """The numbers as integers, since NaN is not equal to itself."""
    plain = torch.as_tensor(np.ascontiguousarray(one) if isinstance(one, np.ndarray) else one)
    plain = torch.view_as_real(plain) if plain.is_complex() else plain.contiguous()
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.view(kinds[plain.element_size()]) if plain.is_floating_point() else plain


def held_in(
    values: Mapping[str, Mapping[Any, Any]],
    models: Collection[int],
    thorough: bool,
    moving: Collection[str],
    size: int,
) -> Iterator[Held]:
    """Those among values and in them, but not of ``models`` (their memory). ``thorough``: the large
    ones, too, else those whose path is ``moving``; ``size``: samples of a global batch.
    """
    waiting = [(path, name, one) for path in values for name, one in values[path].items()]
    seen = set[int]()
    for inside, name, one in waiting:
        if not isinstance(one, HELD) or id(one) in seen:
            continue
        seen.add(id(one))
        path = f'{inside}.{name}'.lstrip('.')
        often = thorough or path in moving
        most = _LARGE if often else _SMALL
        if isinstance(one, torch.Tensor):
            if not (one.requires_grad or one.is_inference() or memory(one) in models):
                small = one.numel() <= most and one.layout is torch.strided
                yield Held(path, one, small and (often or one.is_cpu), often, size)
        elif isinstance(one, np.ndarray):
            if one.size <= most and one.flags.writeable and one.dtype != object:
                yield Held(path, one, True, often, size)
        else:
            if isinstance(one, list) or (len(one) <= most and not isinstance(one, tuple)):
                yield Held(path, one, True, often or len(one) <= _SMALL, size)
            if len(one) <= ITEMS and len(waiting) < _LARGE:
                inner = one.items() if isinstance(one, dict) else enumerate(one)
                waiting += ((path, name, value) for name, value in inner)


def memory(tensor: torch.Tensor) -> int:
    """Where a tensor's numbers are."""
    with suppress(Exception):  # of a sparse one
        return tensor.untyped_storage().data_ptr() or id(tensor)
    return id(tensor)


def of_samples(parts: Collection[Collection[Any]], repeated: float) -> bool | None:
    """Whether each part of a batch has changed entries of its own, as it has samples of its own,
    but for so many that are ``repeated``; False: all have changed (nearly) the same; None: neither.
    """
    every = set[Any]().union(*parts)
    again = sum(map(len, parts)) - len(every)
    if again and all(len(own) >= _NEARLY * len(every) for own in parts):
        return False
    return True if again <= repeated else None
