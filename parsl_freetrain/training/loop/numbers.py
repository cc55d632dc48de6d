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

import torch
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.loop.changes import CONTAINERS, attributes, has_state, is_ours
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.places import Places
from parsl_freetrain.training.loop.unknown_state import set_variables

_NUMBERS = {bool, int, float, type(None)}
_OTHER, _NONE = object(), object()  # what is no number; what is not there
_STATE, _ONES, _MOST, _ITEMS, _SHOWN = 'ctx.state', '', 500, 64, 6
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


def _ones(ones: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]]) -> _Space:
    def values() -> Values:
        found = {}
        for name, (get, _) in ones.items():
            try:
                found[name] = get()
            except (KeyError, ValueError):  # it is gone
                continue
        return found

    def put(values: Values) -> None:
        for name in values.keys() & ones.keys():
            ones[name][1](values[name])

    return values, put


class Numbers:
    """Those of the functions around a loop, of what they use, and of the objects there."""

    def __init__(
        self,
        frames: Sequence[FrameType],
        places: Places,
        known: set[int],
        counts: Sequence[Any],
        state: LoopState,
    ) -> None:
        values = {f'{f.f_code.co_qualname}.{n}': v for f in frames for n, v in f.f_locals.items()}
        values.update((place.path, value) for place, value in places)
        self._spaces: dict[str, _Space] = {}
        self._fixed = {_ONES, *(frame.f_code.co_qualname for frame in frames)}
        for f in frames:
            own: _Space = partial(getattr, f, 'f_locals'), partial(set_variables, f)
            self._spaces[f.f_code.co_qualname] = own
        ones = {
            place.path: (place.value, place.put)
            for place, value in places
            if type(value) in _NUMBERS and not isinstance(place.holder, Dataset)
        }
        for i, one in enumerate(counts):
            ones[f'enumerate {i + 1}'] = partial(number_of, one), partial(set_number, one)
        self._spaces[_ONES] = _ones(ones)
        self._spaces.update(_objects(values, known))
        self._spaces[_STATE] = lambda: state.user.values, lambda v: _put(state.user.values, v)
        self._marks: dict[str, tuple[Any, ...]] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._first: dict[str, Any] | None = None
        self._state, self._last, self.here, self.changed = state, -1, -1, False
        self._said = False

    def remember(self) -> None:
        """Call before the first shard that this rank trains."""
        for path, now, mark in self._differing():
            self._before[path], self._marks[path] = now, mark
        self._first, self.changed = None, False
        self._last, self.here = self.here, self._state.samples

    def undo(self) -> None:
        """Call before each other one: it begins alike, but for ``position = ctx.samples``."""
        places = (self._last, self.here), (None, self.here)
        for path, now, _ in self._differing():
            before = self._before[path]
            then = {n: (before.get(n, _NONE), v) for n, v in now.items() if v is not _OTHER}
            others = {n: b for n, (b, v) in then.items() if b is not v and (b, v) not in places}
            kept = (_OTHER, _NONE) if path in self._fixed else (_OTHER,)
            if found := {n: b for n, b in others.items() if b not in kept}:
                self._spaces[path][1](found)

    def note_first(self) -> None:
        first: dict[str, Any] = {}
        for path, now, _ in self._differing():
            then = self._before[path]
            new = {n: v for n, v in now.items() if v is not then.get(n, _NONE) and v is not _OTHER}
            first |= {path: new} if new else {}
        self._first, self.changed = first, bool(first)

    def take_firsts(self, peers: Peers, first: int, *, changed: bool) -> None:
        """Set all to what they are behind the first shard, which rank ``first`` has trained."""
        self.undo()
        said: dict[str, Values] = {}
        if changed:
            own = json.dumps(self._first or {}).encode()
            said = json.loads(gather_bytes(peers, own)[first])
        if self._first is not None:  # each rank's own, which are compared
            said[_STATE] = self._first.get(_STATE, {})
        for path, values in said.items():
            if path in self._spaces:
                self._spaces[path][1](values)
        names = [name for each in said.values() for name in each]
        if names and not self._said:
            self._said = True
            print(
                f'What the body of ctx.loop changes ({", ".join(names[:_SHOWN])}) is that of the '
                'first virtual shard of each global batch: it counts steps. ctx.report takes means.'
            )

    def _differing(self) -> Iterator[tuple[str, dict[str, Any], tuple[Any, ...]]]:
        """Where something is not as it was at the beginning of the step, and what is there now."""
        for path, (get, _) in self._spaces.items():
            values = get()
            # Identities count: numbers are kept in ``_before``, and others are none of our business
            # as long as they have the same types.
            there = values.values()
            mark = (*values, *map(type, there), *map(id, there))
            if mark != self._marks.get(path):
                numbers = {n: v if type(v) in _NUMBERS else _OTHER for n, v in values.items()}
                yield path, numbers, mark


def _objects(values: Values, known: set[int]) -> Iterator[tuple[str, _Space]]:
    waiting, seen = [*values.items()], set(known)
    for path, one in waiting:
        if isinstance(one, torch.nn.Module) and attributes(one):  # also a prepared one's
            yield path, (_attributes_of(one), partial(_set_all, one))
        if id(one) in seen or is_ours(one) or has_state(one):
            continue
        seen.add(id(one))
        inner: Any = {}
        if isinstance(one, CONTAINERS):
            small = len(one) <= _ITEMS
            inner = one if isinstance(one, dict) else dict(enumerate(one)) if small else {}
            if type(one) is dict and small and all(type(key) is str for key in one):
                yield path, (one.copy, partial(_put, one))
        elif not isinstance(one, (Dataset, DataLoader, type)) and (inner := attributes(one) or {}):
            yield path, (_attributes_of(one), partial(_set_all, one))
        if len(inner) <= _ITEMS and len(waiting) < _MOST:
            waiting += ((f'{path}.{name}', value) for name, value in inner.items())


def _put(own: dict[str, Any], values: Values) -> None:
    own.update(values)
    for name in [name for name, value in values.items() if value is _NONE]:
        del own[name]


def _attributes_of(one: Any) -> Callable[[], Values]:
    get: Any = vars if attributes(one) is getattr(one, '__dict__', None) else attributes
    return partial(get, one)


def _set_all(one: Any, values: Values) -> None:
    for name, value in values.items():
        if value is _NONE:
            object.__delattr__(one, name)
        else:
            object.__setattr__(one, name, value)
