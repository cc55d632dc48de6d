"""Numbers that the body of a loop changes, and what counts its iterations from outside.

In reproducible mode the body runs once for each virtual shard. As with integer buffers, every shard
begins with the numbers of the step's beginning, and the step ends with those behind its first
shard, on all ranks: ``step += 1`` counts steps, wherever the shards are trained.
"""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, GeneratorType
from typing import Any

from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.loop.changes import CONTAINERS, attributes, has_state, is_ours
from parsl_freetrain.training.loop.places import Places
from parsl_freetrain.training.loop.unknown_state import set_variables

_NUMBERS = {bool, int, float}
_MOST, _ITEMS, _SHOWN = 500, 64, 6
Values = Mapping[str, Any]
_Space = tuple[Callable[[], Values], Callable[[Values], object]]
"""Where there are numbers: what gives them by name, and what sets some."""


def counts() -> list[Any]:
    """What enumerates the iterations of the loop that asks for its next batch now."""
    found = [(one, one.__reduce__()[1][0]) for one in gc.get_objects() if type(one) is enumerate]
    return [one for one, its in found if isinstance(its, GeneratorType) and its.gi_running]


def number_of(one: Any) -> int:
    return int(one.__reduce__()[1][1])


def set_number(one: Any, number: int) -> None:
    """Nothing else can set it. It is behind what all objects begin with; else nothing is set."""
    there = ctypes.c_ssize_t.from_address(id(one) + object.__basicsize__)
    if there.value == number_of(one):
        there.value = number


def _one(get: Callable[[], Any], put: Callable[[Any], None]) -> _Space:
    return lambda: {'': get()}, lambda values: put(values[''])


class Numbers:
    """Those of the functions around a loop, of what they use, and of the objects there."""

    def __init__(
        self,
        frames: Sequence[FrameType],
        places: Places,
        known: set[int],
        counts: Sequence[Any],
        samples: Callable[[], int],
    ) -> None:
        values = {f'{f.f_code.co_qualname}.{n}': v for f in frames for n, v in f.f_locals.items()}
        values.update((place.path, value) for place, value in places)
        self._spaces: dict[str, _Space] = {
            frame.f_code.co_qualname: (
                partial(getattr, frame, 'f_locals'),
                partial(set_variables, frame),
            )
            for frame in frames
        }
        for place, value in places:
            if type(value) in _NUMBERS and not isinstance(place.holder, Dataset):
                self._spaces[place.path] = _one(place.value, place.put)
        self._spaces.update(_objects(values, known))
        for i, one in enumerate(counts):
            self._spaces[f'enumerate {i + 1}'] = _one(
                partial(number_of, one), partial(set_number, one)
            )
        self._before: dict[str, dict[str, Any]] = {}
        self._first: dict[str, Any] | None = None
        self._samples, self.changed = samples, False
        self._said = False

    def remember(self) -> None:
        """Call before the first shard that this rank trains."""
        self._before, self._first, self.changed = self._now(), None, False

    def undo(self) -> None:
        """Call before each other one: it begins with the same, but for where training is."""
        here = repr(self._samples())
        for path, now in self._now().items():
            if now != (before := self._before[path]):
                others = {n for n, v in now.items() if v is not before.get(n) and repr(v) != here}
                self._spaces[path][1]({n: before[n] for n in others if n in before})

    def note_first(self) -> None:
        before = self._before
        changed = {
            path: {n: v for n, v in now.items() if before[path].get(n) is not v}
            for path, now in self._now().items()
            if now != before[path]
        }
        self._first, self.changed = changed, bool(changed)

    def take_firsts(self, peers: Peers, first: int, *, changed: bool) -> None:
        """Set all to what they are behind the first shard, which rank ``first`` has trained."""
        self.undo()
        if not changed:
            return
        own = json.dumps(self._first or {}).encode()
        said: dict[str, Values] = json.loads(gather_bytes(peers, own)[first])
        for path, values in said.items():
            if path in self._spaces:
                self._spaces[path][1](values)
        names = [name or path for path, each in said.items() for name in each]
        if not self._said:
            self._said = True
            print(
                f'Numbers that the body of ctx.loop changes ({", ".join(names[:_SHOWN])}) are '
                'those behind the first virtual shard of each global batch: they count steps. A '
                'mean over all samples is what ctx.report takes.'
            )

    def _now(self) -> dict[str, dict[str, Any]]:
        return {
            path: {n: v for n, v in values().items() if type(v) in _NUMBERS}
            for path, (values, _) in self._spaces.items()
        }


def _objects(values: Values, known: set[int]) -> Iterator[tuple[str, _Space]]:
    """The user's own objects and the dicts among values, and in them."""
    waiting, seen = [*values.items()], set(known)
    for path, one in waiting:
        if id(one) in seen or is_ours(one) or has_state(one):
            continue
        seen.add(id(one))
        inner: Any = {}
        if isinstance(one, CONTAINERS):
            small = len(one) <= _ITEMS
            inner = one if isinstance(one, dict) else dict(enumerate(one)) if small else {}
            if type(one) is dict and small and all(type(key) is str for key in one):
                yield path, (one.copy, one.update)
        elif not isinstance(one, (Dataset, DataLoader, type)):
            inner = attributes(one) or {}
            whole = inner is getattr(one, '__dict__', None)
            get: Any = inner.copy if whole else partial(attributes, one)
            if inner:
                yield path, (get, inner.update if whole else partial(_set_all, one))
        if len(inner) <= _ITEMS and len(waiting) < _MOST:
            waiting += ((f'{path}.{name}', value) for name, value in inner.items())


def _set_all(one: Any, values: Values) -> None:
    for name, value in values.items():
        setattr(one, name, value)
