"""What the body of a loop changes beside models.

In reproducible mode the body runs once for each virtual shard. As with integer buffers, every shard
begins with what there was at the step's beginning, and the step ends with what there is behind its
first shard, on all ranks: ``step += 1`` and ``losses.append(...)`` count steps, wherever the shards
are trained.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import lru_cache, partial
from io import BytesIO
from itertools import chain, islice
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.loop import changes
from parsl_freetrain.training.loop.enumerated import number_of, set_number
from parsl_freetrain.training.loop.held import HELD, ITEMS, Held, held_in, memory
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.packing import How, NotPlain, packed, unpacked
from parsl_freetrain.training.loop.places import OF_TORCH, Place, Places, live_names, names_in_loop
from parsl_freetrain.training.loop.unknown_state import among, set_variables

_OTHER, _NONE = object(), object()  # what does not follow; what is not there
_STATE, _ONES, _MODULES, _METRICS, _MOST, _SHOWN = 'ctx.state', '', '.', '..', 500, 6
_SENT = 10**5, 2**24  # elements and bytes at most
Values = Mapping[Any, Any]
_Differing = tuple[str, dict[Any, Any], tuple[Any, ...]]  # where, what is there now, and its mark
_Space = tuple[Callable[[], Values], Callable[[Values], object]]
"""Where there are values: what gives them by name, and what sets some."""


def _ones(places: Sequence[Place], counts: Sequence[Any]) -> _Space:
    named = {p.path: (p.holder, p.name) for p in places if isinstance(p.holder, dict)}
    ones: dict[str, Any] = {place.path: (place.value, place.put) for place in places}
    for i, one in enumerate(counts, 1):
        ones[f'enumerate {i}'] = partial(number_of, one), partial(set_number, one)
    others = {name: get for name, (get, _) in ones.items() if name not in named}

    def values() -> Values:
        found = {name: own[key] for name, (own, key) in named.items() if key in own}
        for name, get in others.items():
            try:  # as suppress(), which takes longer than the rest
                found[name] = get()
            except (KeyError, ValueError):  # it is gone
                continue
        return found

    def put(values: Values) -> None:
        for name in values.keys() & ones.keys():
            ones[name][1](values[name])

    return values, put


def _set_in_modules(modules: Mapping[str, torch.nn.Module], names: AbstractSet[str]) -> _Space:
    """Attributes that functions set: some are first there behind a forward pass."""

    def values() -> Values:
        both = ((path, vars(module)) for path, module in modules.items())
        return {f'{path}.{name}': own[name] for path, own in both for name in names & own.keys()}

    def put(values: Values) -> None:
        for path, value in values.items():
            of, _, name = path.rpartition('.')
            _put(vars(modules[of]) if of in modules else {}, {name: value})

    return values, put


def _of_metrics(metrics: Mapping[str, Any]) -> _Space:
    """Copies of what metrics hold, which they change in place."""
    kept: dict[str, tuple[Any, dict[str, Any]]] = {}

    def copied(one: Any, within: bool = False) -> Any:
        if isinstance(one, torch.Tensor):
            return one if within else one.clone()
        if isinstance(one, dict):
            found = copy.copy(one)  # some have a default
            found.update((name, copied(value)) for name, value in one.items())
            return found
        return [copied(value, True) for value in one] if type(one) is list else one

    def looked_at(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return id(one), 0 if one.is_inference() else one._version
        if isinstance(one, dict):
            return [*map(looked_at, one.values())]
        return (len(one), looked_at(one[-1])) if isinstance(one, list) and one else one

    def values() -> Values:
        for path, one in metrics.items():
            its = changes.state_of(one)
            if path not in kept or kept[path][0] != looked_at(its):
                kept[path] = looked_at(its), {f'{path}.{k}': copied(v) for k, v in its.items()}
        return {name: value for _, its in kept.values() for name, value in its.items()}

    def put(values: Values) -> None:
        for name, value in values.items():
            path, _, key = name.rpartition('.')
            if path in metrics:
                changes.load_state(metrics[path], {key: copied(value)})
                kept[path][1][name] = value
        for path, (_, its) in kept.items():
            kept[path] = looked_at(changes.state_of(metrics[path])), its

    return values, put


class Numbers:
    """The values of the functions around a loop, of what they use, and of the objects there."""

    def __init__(
        self,
        frames: Sequence[FrameType],
        places: Places,
        how: How,
        counts: Sequence[Any],
        state: LoopState,
    ) -> None:
        values = {f'{f.f_code.co_qualname}.{n}': v for f in frames for n, v in f.f_locals.items()}
        values.update((place.path, value) for place, value in places)
        self._spaces: dict[str, _Space] = {}  # the first names what several have
        self._spaces[_STATE] = lambda: state.user.values, lambda v: _put(state.user.values, v)
        self._fixed = {_ONES, *(frame.f_code.co_qualname for frame in frames)}
        self._data = dict[str, frozenset[str]]()  # variables that may hold data from step to step
        for f in frames:
            names = live_names(f.f_code, f.f_lasti)
            self._data[f.f_code.co_qualname] = names_in_loop(f.f_code, f.f_lasti)
            own: _Space = partial(_variables, f, names), partial(set_variables, f)
            self._spaces[f.f_code.co_qualname] = own
        users = {*map(id, places.modules.values())}
        ones = [
            place
            for place, value in places
            if _is_followed(value)
            and (
                id(place.holder) not in users
                or (isinstance(value, HELD[:-1]) and place.name not in places.stored)
            )
        ]
        self._spaces[_ONES] = _ones(ones, counts)
        self._spaces[_MODULES] = _set_in_modules(places.modules, places.stored - OF_TORCH)
        self._spaces.update(_objects(values, how.known))
        metrics = {place.path.rstrip('.'): one for place, one in places if changes.is_metric(one)}
        self._spaces[_METRICS] = _of_metrics(metrics)
        self._marks: dict[str, tuple[Any, ...]] = {}
        modules = [*among(values, torch.nn.Module).values()]
        self._names = {name for one in modules for name, _ in one.named_parameters()}
        tensors = [t for one in modules for t in (*one.parameters(), *one.buffers())]
        self._models = {*map(memory, (*how.live, *tensors))}
        self._before: dict[str, dict[Any, Any]] = {}
        self._held: dict[str, Held] = {}
        self._moving = set[str]()  # what is held and has changed once
        self._first: dict[str, tuple[list[Any], Any]] | None = None
        self._how, self._state, self._steps = how, state, 0
        self._last, self.here, self.changed, self._said = -1, -1, False, False

    def remember(self) -> None:
        """Call before the first shard that this rank trains."""
        self._steps += 1
        for path, now, mark in self._differing():
            self._before[path], self._marks[path] = now, mark
        self._first, self.changed = None, False
        thorough = self._steps & (self._steps - 1) == 0
        found = held_in(self._before, self._models, thorough, self._moving)
        self._held = {one.path: one for one in found}
        self._last, self.here = self.here, self._state.samples

    def undo(self, *, first: bool = False) -> None:
        """Call after each shard: all begin alike, but for ``position = ctx.samples``."""
        differing = [*self._differing()]
        changed = [held for held in self._held.values() if held.changed()]
        if first:
            self._note_first(differing, changed)
        for held in changed:
            self._moving.add(held.path)
            held.put_back(self._is_place)
        for path, now, _ in differing:
            before, back = self._before[path], dict[Any, Any]()
            for name, then in before.items():
                if name not in now and path not in self._fixed:
                    back[name] = then
            for name, value in now.items():
                then = before.get(name, _NONE)
                left = then is _OTHER or (then is _NONE and path in self._fixed)
                if left or then is value or not self._follows(path, name, value):
                    continue
                if not self._is_place(then, value):
                    back[name] = then
            if back:
                self._spaces[path][1](back)

    def _is_place(self, then: Any, now: Any) -> bool:
        numbers = type(now) is int and isinstance(then, (int, type(None)))
        return numbers and now == self.here and then in (self._last, None)

    def _note_first(self, differing: Sequence[_Differing], changed: Sequence[Held]) -> None:
        first: dict[str, tuple[list[Any], Any]] = {}
        for path, now, _ in differing:
            then = self._before[path]
            new = {n: v for n, v in now.items() if v is not then.get(n, _NONE)}
            new = {n: v for n, v in new.items() if self._follows(path, n, v)}
            gone = [] if path in self._fixed else [n for n in then if n not in now]
            if new or gone:
                first[path] = gone, new
        for held in changed:
            first[held.path] = held.difference(held.now())
            held.refuse_weights(first[held.path][1], self._names)
        self._first, self.changed = first, bool(first)

    def take_firsts(self, peers: Peers, first: int, *, changed: bool) -> None:
        """Set all to what they are behind the first shard, which rank ``first`` has trained."""
        own = self._first or {}
        said = own if changed else {}
        if changed and peers.world_size > 1:
            sent = gather_bytes(peers, self._packed() if peers.rank == first else b'')[first]
            said = own if peers.rank == first else {**own, **self._unpacked(sent)}
        if self._first is not None:  # each rank's own, which are compared
            said = {p: one for p, one in said.items() if not p.startswith(_STATE)}
            said |= {p: one for p, one in own.items() if p.startswith(_STATE)}
        for path, (gone, come) in said.items():
            if path in self._held:
                self._held[path].take(gone, come)
            elif path in self._spaces:
                self._spaces[path][1]({**come, **dict.fromkeys(gone, _NONE)})
        if said and not self._said:
            self._said = True
            names = islice(chain(*([p] if p in self._held else said[p][1] for p in said)), _SHOWN)
            print(
                f'What the body of ctx.loop changes ({", ".join(names)}) is that of the first '
                'virtual shard of each global batch: it counts steps. ctx.report takes means.'
            )

    def _differing(self) -> Iterator[_Differing]:
        """Where something is not as it was at the beginning of the step, and what is there now."""
        for path, (get, _) in self._spaces.items():
            values = get()
            # Identities count: what follows is kept in ``_before``, and the rest is none of our
            # business as long as it has the same types.
            there = values.values()
            mark = (*values, *map(type, there), *map(id, there))
            if mark != self._marks.get(path):
                found = {n: v if _is_followed(v) else _OTHER for n, v in values.items()}
                yield path, found, mark

    def _follows(self, path: str, name: str, value: Any) -> bool:
        return _follows(value, name in self._data.get(path, (name,)))

    def _packed(self) -> bytes:
        """What has changed behind the first shard, as far as it can be sent."""
        first, sent, file = self._first or {}, dict[str, Any](), BytesIO()
        for path, (gone, come) in first.items():
            each = come if isinstance(come, dict) else {'': come}
            found = {}
            for name, one in each.items():
                with suppress(NotPlain):
                    found[name] = packed(one, self._how, room=[*_SENT])
            sent[path] = gone, found, each is come
        torch.save(sent, file)
        return file.getvalue()

    def _unpacked(self, sent: bytes) -> dict[str, Any]:
        said = {}
        read = torch.load(BytesIO(sent), map_location='cpu', weights_only=True)
        for path, (gone, found, named) in read.items():
            values = {name: unpacked(one, None, self._how) for name, one in found.items()}
            if named or values:
                said[path] = gone, values if named else values['']
        return said


def _follows(one: Any, data: bool = True) -> bool:
    """Whether what is set to it follows: not what has a graph, nor a variable with ``data``."""
    if isinstance(one, torch.Tensor):
        return (data or one.numel() == 1) and not one.requires_grad
    if isinstance(one, (list, tuple, deque, dict)):
        inner = islice(one.values() if isinstance(one, dict) else one, ITEMS)
        return all(_follows(each, data) for each in inner)
    return _is_followed(one)


def _is_followed(one: Any) -> bool:
    return isinstance(one, changes.KINDS) or _is_users(type(one))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _is_users(kind: type) -> bool:
    """Whether it is a class of the user's whose objects checkpoints hold as they are."""
    others = Dataset, DataLoader, torch.nn.Module, torch.optim.Optimizer, type
    known = issubclass(kind, others) or hasattr(kind, 'state_dict')
    return not known and changes.slots(kind) is not None


def _objects(values: Values, known: set[int]) -> Iterator[tuple[str, _Space]]:
    """The user's own objects among values, and in them."""
    waiting, seen = [*values.items()], set(known)
    for path, one in waiting:
        if id(one) in seen or changes.is_ours(one) or changes.has_state(one):
            continue
        seen.add(id(one))
        inner: Any = {}
        if isinstance(one, changes.CONTAINERS) and len(one) <= ITEMS:
            inner = one if isinstance(one, dict) else dict(enumerate(one))
        if not isinstance(one, (Dataset, DataLoader, type)) and (own := changes.attributes(one)):
            get: Any = vars if own is getattr(one, '__dict__', None) else changes.attributes
            yield f'{path}:', (partial(get, one), partial(_set_all, one))
            inner = {**inner, **own}
        if len(inner) <= ITEMS and len(waiting) < _MOST:
            waiting += ((f'{path}.{name}', value) for name, value in inner.items())


def _variables(frame: FrameType, names: frozenset[str]) -> Values:
    return {name: value for name, value in frame.f_locals.items() if name in names}


def _put(own: dict[str, Any], values: Values) -> None:
    for name, value in values.items():
        own.pop(name, None) if value is _NONE else own.update({name: value})


def _set_all(one: Any, values: Values) -> None:
    for name, value in values.items():
        if value is _NONE:
            object.__delattr__(one, name)
        else:
            object.__setattr__(one, name, value)
