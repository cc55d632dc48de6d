"""Containers, arrays and tensors that the body of a loop may change in place: as they were."""

from __future__ import annotations

from collections import OrderedDict
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
_SMALL, _LARGE = 1_000, 10**6  # elements of what is looked at in each step, and in some
_TAIL = 256  # of a list of which the last elements are looked at


class Held:
    """A container, an array, or a tensor, as it was. ``copied``: whether it can be put back."""

    def __init__(self, path: str, one: Any, copied: bool) -> None:
        self.path, self.one, self._copied = path, one, copied
        self._start = max(0, len(one) - _TAIL) if isinstance(one, list) else 0
        self._version = one._version if isinstance(one, torch.Tensor) else 0
        self.then = self.now()

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
        if differs and (not self._copied or (self._start and len(one) < self._start)):
            self._refuse('')
        return bool(differs)

    def refuse_weights(self, come: Any, names: Collection[str]) -> None:
        """Raises BadInput if what has come to a dict has names of parameters, as averages have."""
        for name in come if isinstance(come, dict) else ():
            if name in names and isinstance(come[name], torch.Tensor):
                self._refuse(f'.{name}')

    def _refuse(self, name: str) -> None:
        one = self.one[name[1:]] if name else self.one
        raise BadInput(
            f'The body of ctx.loop changed {self.path}{name}, a {type(one).__name__}. It runs once '
            'for each virtual shard, and before the step of the optimizer, so the result would '
            'depend on the nodes: do it in ctx.after_step(fn) or ctx.each_epoch(fn) (a moving '
            'average of weights: ctx.ema), or keep it in a buffer of a module that is given to '
            'ctx.prepare, which becomes the mean over the shards.'
        )

    def put_back(self, is_place: Callable[[Any, Any], bool]) -> None:
        """Set it to what it was, but for numbers that say where training is."""
        then, now = self.then, self.now()
        if isinstance(then, dict):
            then = {k: now[k] if is_place(one, now.get(k)) else one for k, one in then.items()}
        elif isinstance(then, list) and len(then) == len(now):
            then = [n if is_place(one, n) else one for one, n in zip(then, now, strict=True)]
        self.put(then)

    @torch.no_grad()
    def put(self, content: Any) -> None:
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

    def difference(self, now: Any) -> tuple[Any, Any]:
        """Of its content then and ``now``: what is gone, and what has come."""
        then = self.then
        if isinstance(then, dict):
            come = {key: one for key, one in now.items() if then.get(key, self) is not one}
            return [key for key in then if key not in now], come
        if isinstance(then, list):
            gone = range(max(0, len(then) - len(now)), min(len(then), ITEMS) + 1)
            n = next((n for n in gone if all(map(is_, then[n:], now))), len(then))
            return n, now[len(then) - n :]
        return None, now

    def take(self, gone: Any, come: Any) -> None:
        if isinstance(self.then, dict):
            kept = {key: one for key, one in self.then.items() if key not in gone}
            come = {**kept, **come}
        self.put(self.then[gone:] + come if isinstance(self.then, list) else come)


def held_in(
    values: Mapping[str, Mapping[Any, Any]],
    models: Collection[int],
    thorough: bool,
    moving: Collection[str],
) -> Iterator[Held]:
    """Those among values and in them, but not of ``models`` (their memory). ``thorough``: the large
    ones, too, else those whose path is ``moving``.
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
                yield Held(path, one, one.numel() == 1 and (often or one.is_cpu))
        elif isinstance(one, np.ndarray):
            if one.size <= most and one.flags.writeable and one.dtype != object:
                yield Held(path, one, True)
        else:
            if isinstance(one, list) or (len(one) <= most and not isinstance(one, tuple)):
                yield Held(path, one, True)
            if len(one) <= ITEMS and len(waiting) < _LARGE:
                inner = one.items() if isinstance(one, dict) else enumerate(one)
                waiting += ((path, name, value) for name, value in inner)


def memory(tensor: torch.Tensor) -> int:
    """Where a tensor's numbers are."""
    with suppress(Exception):  # of a sparse one
        return tensor.untyped_storage().data_ptr() or id(tensor)
    return id(tensor)
