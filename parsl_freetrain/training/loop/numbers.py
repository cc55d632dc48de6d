"""What the body of a loop changes beside models.

In reproducible mode the body runs once for each virtual shard. As with integer buffers, every shard
begins with what there was at the step's beginning, and the step ends with what there is behind its
first shard, on all ranks: ``step += 1`` and ``losses.append(...)`` count steps, wherever the shards
are trained. Tables by sample (``losses[i] = ...``) get the entries of all shards, or ranks.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import BytesIO
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.training.comm.peers import Peers, gather_bytes
from parsl_freetrain.training.loop import changes, spaces
from parsl_freetrain.training.loop.held import (
    HELD,
    ITEMS,
    Difference,
    Held,
    held_in,
    memory,
    of_samples,
)
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.packing import How, NotPlain, packed, plain_key, unpacked
from parsl_freetrain.training.loop.places import OF_TORCH, Places, live_names, names_in_loop
from parsl_freetrain.training.loop.spaces import NONE, Space, Values
from parsl_freetrain.training.loop.unknown_state import among, set_variables

_OTHER = object()  # what does not follow
_STATE, _ONES, _MODULES, _METRICS, _MOST, _SHOWN = 'ctx.state', '', '.', '..', 500, 6
_Differing = tuple[str, dict[Any, Any], tuple[Any, ...]]  # where, what is there now, and its mark


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
        self._spaces: dict[str, Space] = {}  # the first names what several have
        self.shared: list[Space] = []  # without what is the loop's function's own
        self._spaces[_STATE] = lambda: state.user.values, lambda v: spaces.put(state.user.values, v)
        self._fixed = {_ONES, *(frame.f_code.co_qualname for frame in frames)}
        self._data = dict[str, frozenset[str]]()  # variables that may hold data from step to step
        for f in frames:
            names = live_names(f.f_code, f.f_lasti)
            self._data[f.f_code.co_qualname] = names_in_loop(f.f_code, f.f_lasti)
            own: Space = partial(_variables, f, names), partial(set_variables, f)
            self._spaces[f.f_code.co_qualname] = own
            inner = frozenset(f.f_code.co_cellvars)
            self.shared.append((partial(_variables, f, inner), partial(set_variables, f)))
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
        self._spaces[_ONES] = spaces.ones_of(ones, counts)
        self._spaces[_MODULES] = spaces.set_in_modules(places.modules, places.stored - OF_TORCH)
        self._spaces.update(_objects(values, how.known))
        self.shared += [space for path, space in self._spaces.items() if path not in self._data]
        metrics = {place.path.rstrip('.'): one for place, one in places if changes.is_metric(one)}
        self._spaces[_METRICS] = spaces.of_metrics(metrics)
        self._marks: dict[str, tuple[Any, ...]] = {}
        modules = [*among(values, torch.nn.Module).values()]
        self._names = {name for one in modules for name, _ in one.named_parameters()}
        tensors = [t for one in modules for t in (*one.parameters(), *one.buffers())]
        self._models = {*map(memory, (*how.live, *tensors))}
        self._before: dict[str, dict[Any, Any]] = {}
        self._held: dict[str, Held] = {}
        self._moving = set[str]()  # what is held and has changed once
        # By shard, or rank: all of this rank's first shard, and entries of tables.
        self._changes = dict[int, dict[str, Difference]]()
        self._own: dict[str, Difference] | None = None  # the first of these
        self._batch: Sequence[int] = ()
        self._by_ranks = False
        self._how, self._state, self._steps = how, state, 0
        self._last, self.here, self.changed, self._said = -1, -1, False, False

    def remember(self, batch: Sequence[int]) -> None:
        """Call before the first shard that this rank trains of the samples of a global batch."""
        self._steps += 1
        self._own, self._changes, self.changed = None, {}, False
        self._hold(batch, self._steps & (self._steps - 1) == 0)
        self._last, self.here = self.here, self._state.samples

    def _hold(self, batch: Sequence[int], thorough: bool) -> None:
        for path, now, mark in self._differing():
            self._before[path], self._marks[path] = now, mark
        how = self._models, thorough, self._moving, len(batch)
        self._held = {one.path: one for one in held_in(self._before, *how)}
        self._batch = batch

    def undo(self, shard: int | None, *, first: bool = False) -> None:
        """Call after each shard: all begin alike, but for ``position = ctx.samples``."""
        differing = [*self._differing()]
        changed = {held: held.difference() for held in self._held.values() if held.changed()}
        if first:
            self._own = self._of_spaces(differing)
            self._own.update((held.path, one) for held, one in changed.items())
        own = self._own if first else self._of_tables(changed)
        if own and shard is not None:
            self._changes[shard], self.changed = own, True
        for held, difference in changed.items():
            held.refuse_weights(difference[1], self._names)
            if not isinstance(held.one, list) or isinstance(difference[1], dict):
                self._moving.add(held.path)
            held.put_back(self._is_place)
        for path, now, _ in differing:
            before, back = self._before[path], dict[Any, Any]()
            for name, then in before.items():
                if name not in now and path not in self._fixed:
                    back[name] = then
            for name, value in now.items():
                then = before.get(name, NONE)
                left = then is _OTHER or (then is NONE and path in self._fixed)
                if left or then is value or not self._follows(path, name, value):
                    continue
                if not self._is_place(then, value):
                    back[name] = then
            if back:
                self._spaces[path][1](back)

    def _is_place(self, then: Any, now: Any) -> bool:
        numbers = type(now) is int and isinstance(then, (int, type(None)))
        return numbers and now == self.here and then in (self._last, None)

    def _of_spaces(self, differing: Sequence[_Differing]) -> dict[str, Difference]:
        first: dict[str, Difference] = {}
        for path, now, _ in differing:
            then = self._before[path]
            new = {n: v for n, v in now.items() if v is not then.get(n, NONE)}
            new = {n: v for n, v in new.items() if self._follows(path, n, v)}
            gone = [] if path in self._fixed else [n for n in then if n not in now]
            if new or gone:
                first[path] = gone, new
        return first

    @staticmethod
    def _of_tables(changed: Mapping[Held, Difference]) -> dict[str, Difference]:
        return {h.path: ([], own) for h, one in changed.items() if (own := h.entries(one))}

    def take_firsts(self, peers: Peers, first: int, *, changed: bool) -> None:
        """Set all to what they are behind the first shard, which rank ``first`` has trained, and
        put tables together.
        """
        if changed and peers.world_size > 1:
            if self._own and self._changes and peers.rank != first:
                known = {held: self._own[p] for p, held in self._held.items() if p in self._own}
                self._changes[min(self._changes)] = self._of_tables(known)
            self._exchange(peers)
        names = list[str]()
        for path in (*self._spaces, *self._held) if self._changes else ():
            parts = self._parts(path)
            if path.startswith(_STATE) and self._own is not None:  # each rank's, to be compared
                parts = [self._own[path]] if path in self._own else []
            if parts and path in self._held:
                self._put_together(self._held[path], parts)
                names += [path] * (len(parts) == 1)
            elif parts:
                gone, come = parts[0]
                self._spaces[path][1]({**come, **dict.fromkeys(gone, NONE)})
                names += come
        if names and not self._said:
            self._said = True
            print(
                f'What the body of ctx.loop changes ({", ".join(names[:_SHOWN])}) is that of the '
                'first virtual shard of each global batch: it counts steps. ctx.report takes means.'
            )

    def _parts(self, path: str) -> list[Difference]:
        return [own[path] for _, own in sorted(self._changes.items()) if path in own]

    def _put_together(self, held: Held, parts: Sequence[Difference]) -> None:
        each = [held.entries(one) for one in parts]
        repeated = math.inf if self._by_ranks else len(self._batch) - len({*self._batch})
        together, known = of_samples(each, repeated), {*each[0]}
        if together is None or (torch.is_tensor(held.one) and not (together or self._by_ranks)):
            held.refuse()
        if together is not False or not self._by_ranks:
            held.take(*parts[0])
        for entries in each[1:] if together is not False else ():
            held.take((), {key: one for key, one in entries.items() if key not in known})
            known |= entries.keys()

    def put_together(self, peers: Peers) -> None:
        """In other modes, where ranks agree to: put the entries of tables together that each has
        changed since the last call.
        """
        self.has_parts(peers.rank)
        self._exchange(peers)
        for path, held in self._held.items():
            if parts := self._parts(path):
                self._put_together(held, parts)
        self.watch(self._batch)

    def has_parts(self, rank: int) -> bool:
        """Whether this rank has changed tables since they were put together, in other modes."""
        tables = [held for held in self._held.values() if self._by_ranks and held.may_be_table]
        changed = {held: held.difference() for held in tables if held.changed()}
        self._changes = {rank: own} if (own := self._of_tables(changed)) else {}
        return bool(self._changes)

    def watch(self, batch: Sequence[int]) -> None:
        """Begin to look for changes of tables. ``batch``: as many numbers as a global batch."""
        self._by_ranks = True
        self._hold(batch, True)

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

    def _exchange(self, peers: Peers) -> None:
        """Have what all ranks have changed, as far as it can be sent."""
        sent, file = dict[int, Any](), BytesIO()
        for shard, own in self._changes.items():
            sent[shard] = {path: self._packed(*difference) for path, difference in own.items()}
        torch.save((self._how.ids_now, sent), file)
        said = gather_bytes(peers, file.getvalue() if sent else b'')
        for rank, one in enumerate(said):
            if rank != peers.rank and one:
                ids, read = torch.load(BytesIO(one), map_location='cpu', weights_only=True)
                how = self._how.where(ids)
                for shard, its in read.items():
                    self._changes[shard] = {
                        path: (_read(gone, True, how) if named else gone, _read(found, named, how))
                        for path, (gone, found, named) in its.items()
                        if named or found
                    }

    def _packed(self, gone: Any, come: Any) -> tuple[Any, dict[Any, Any], bool]:
        named = isinstance(come, dict)
        gone = self._sendable(dict.fromkeys(gone)) if isinstance(gone, list) else gone
        return gone, self._sendable(come if named else {'': come}), named

    def _sendable(self, values: Values) -> dict[Any, Any]:
        found = {}
        for name, one in values.items():
            with suppress(NotPlain):
                found[plain_key(name)] = packed(one, self._how, room=[10**5, 2**24])
        return found


def _read(found: Values, named: bool, how: How) -> Any:
    values: Values = {how.ids.get(n, n): unpacked(one, None, how) for n, one in found.items()}
    return values if named else values['']


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


def _objects(values: Values, known: set[int]) -> Iterator[tuple[str, Space]]:
    """The user's own objects among values, and in them, and any with a ``state_dict``."""
    waiting, seen = [*values.items()], set(known)
    for path, one in waiting:
        others = isinstance(one, (torch.nn.Module, Iterator)) or changes.is_metric(one)
        if id(one) in seen or changes.is_ours(one) or others:
            continue
        seen.add(id(one))
        inner: Any = {}
        if isinstance(one, changes.CONTAINERS) and len(one) <= ITEMS:
            inner = one if isinstance(one, dict) else dict(enumerate(one))
        if isinstance(one, (Dataset, DataLoader, type)):
            own = None
        elif (own := changes.attributes(one)) is None and changes.has_state(one):
            own = getattr(one, '__dict__', None)
        if own:
            get: Any = vars if own is getattr(one, '__dict__', None) else changes.attributes
            yield f'{path}:', (partial(get, one), partial(_set_all, one))
            inner = {**inner, **own}
        if len(inner) <= ITEMS and len(waiting) < _MOST:
            waiting += ((f'{path}.{name}', value) for name, value in inner.items())


def _variables(frame: FrameType, names: frozenset[str]) -> Values:
    return {name: value for name, value in frame.f_locals.items() if name in names}


def _set_all(one: Any, values: Values) -> None:
    for name, value in values.items():
        if value is NONE:
            object.__delattr__(one, name)
        else:
            object.__setattr__(one, name, value)
