"""State in the variables of the user's function (the best score so far, patience, an average): what
changes while training goes on and is read later. A checkpoint holds it, by name.
"""

from __future__ import annotations

import ctypes
import dis
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.trainables import Prepared
from parsl_freetrain.training.loop.changes import (
    COPIED,
    LIBRARIES,
    SCALARS,
    attributes,
    has_state,
    is_large,
    mark,
    may_be_saved,
)
from parsl_freetrain.training.steps.buffers import is_plain

_MOST, _MOST_BYTES = 100_000, 2**30  # elements and bytes of what is saved of a variable
_OURS = 'parsl_freetrain.'
_ENDS = ('RETURN_VALUE', 'RETURN_CONST', 'RAISE_VARARGS', 'RERAISE')
_JUMPS = ('JUMP_FORWARD', 'JUMP_BACKWARD', 'JUMP_BACKWARD_NO_INTERRUPT')


class Carried:
    """The variables of the functions around a loop, in one fragment; ``saved``: what the checkpoint
    holds of them; None: training begins.

    A fragment repeats what is before ``ctx.epochs()`` and before ``ctx.loop``, and what is between
    the two, so there are two moments: at the beginning of the epoch, and in the loop.
    """

    def __init__(self, saved: Mapping[str, Any] | None, device: torch.device) -> None:
        self._saved, self._device = dict(saved or {}), device
        self._frames: list[FrameType] = []
        self._known: set[int] = set()
        self._live: list[torch.Tensor] = []
        self._marks: dict[str, Any] | None = None
        self._at_epoch: dict[str, Any] | None = None
        self._kept: dict[str, Any] = {}
        self._once: list[Any] = []

    def look(self, known: Iterable[Any], prepared: Prepared) -> None:
        """Call in ``ctx.epochs`` and ``ctx.loop``. ``known``: objects that are saved already."""
        self._frames, self._known = _frames(), set(map(id, known))
        self._live = prepared.tensors()
        if self._marks is None:
            self._marks = {path: mark(one) for path, one in self._variables(all_of=True)}

    def forget(self) -> None:
        """Let go of the user's frames, which may hold workers of a loader."""
        self._frames = []

    def begin_epoch(self) -> None:
        self._at_epoch = self._changed()

    def put_back(self, moment: str) -> None:
        """Set variables to what the checkpoint holds: 'epoch' or 'loop'."""
        saved = self._saved.get(moment, {})
        for frame in self._frames:
            here = f'{frame.f_code.co_qualname}.'
            found = {path.removeprefix(here): path for path in saved if path.startswith(here)}
            found = {name: path for name, path in found.items() if name.isidentifier()}
            now = frame.f_locals
            values = {name: self._value(saved[path], now.get(name)) for name, path in found.items()}
            if values:
                frame.f_locals.update(values)
                if sys.version_info < (3, 13):  # later, a frame's variables can be set directly
                    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))

    def state(self, *, finished: bool, room: list[int] | None = None) -> dict[str, Any]:
        """What a checkpoint holds; ``finished``: the function has returned; ``room``: elements and
        bytes that there may be in all, of which those that there are are taken off.
        """
        return {
            'epoch': self._at_epoch or {},
            'loop': {} if finished else self._changed(room),
            'kept': {
                name: _packed(one.state_dict(), self._live, room=room)
                for name, one in self._kept.items()
            },
            'once': [*self._once],
        }

    def copied(self) -> dict[str, Any] | None:
        """As :meth:`state`; None: that is too large to be copied at the end of each batch."""
        room = [*COPIED]
        with suppress(_NotPlain):
            found = self.state(finished=False, room=room)
            return found if min(room) >= 0 else None
        return None

    def keep(self, thing: Any, name: str | None) -> None:
        """As ``ctx.keep``."""
        kind = type(thing).__name__
        if not has_state(thing):
            raise BadInput(
                f'ctx.keep was given a {kind}; it takes objects with state_dict and '
                'load_state_dict.'
            )
        name = name or f'{kind}_{len(self._kept) + 1}'
        if name in self._kept:
            raise BadInput(f'ctx.keep was called twice with the name {name!r}: give other names.')
        if (then := self._saved.get('kept', {}).get(name)) is not None:
            thing.load_state_dict(self._value(then))
        try:
            _packed(thing.state_dict(), self._live)
        except _NotPlain as error:
            raise BadInput(
                f'ctx.keep was given a {kind} whose state has a {error} in it: a checkpoint holds '
                'tensors, numbers, texts and containers of them.'
            ) from None
        self._kept[name] = thing

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of objects that have a state: given to :meth:`keep`, or found in variables."""
        things = {path.rpartition('.')[2]: one for path, one in self._variables() if has_state(one)}
        found: dict[str, torch.Tensor] = {}

        def walk(path: str, value: Any) -> None:
            if isinstance(value, torch.Tensor):
                found[path] = value
            elif isinstance(value, (list, tuple)):
                for i, one in enumerate(value):
                    walk(f'{path}[{i}]', one)
            elif isinstance(value, dict):
                for key, one in value.items():
                    walk(f'{path}.{key}', one)

        for name, one in {**things, **self._kept}.items():
            if not isinstance(one, torch.nn.Module):
                walk(name, one.state_dict())
        return found

    def once(self, function: Callable[[], Any]) -> Any:
        """As ``ctx.once``."""
        then = self._saved.get('once', [])[len(self._once) : len(self._once) + 1]
        if then and not _is_state(then[0]):
            self._once.append(then[0])
            return self._value(then[0])
        value = function()
        if then:
            self._value(then[0], value)
        try:
            self._once.append(_packed(value, self._live))
        except _NotPlain as error:
            raise BadInput(
                f'The function given to ctx.once returned what has a {error} in it: return '
                'tensors, numbers, texts and containers of them, or a module.'
            ) from None
        return value

    def _value(self, packed: Any, now: Any = None) -> Any:
        return _unpacked(packed, now, self._live, self._device)

    def _variables(self, *, all_of: bool = False) -> Iterator[tuple[str, Any]]:
        for frame in self._frames:
            code, own = frame.f_code, frame.f_locals
            for name in own if all_of else live_names(code, frame.f_lasti) & own.keys():
                one = own[name]
                ours = type(one).__module__.startswith(_OURS)
                ours |= isinstance(one, (Dataset, DataLoader)) or id(one) in self._known
                if not (ours or (callable(one) and not has_state(one))):
                    yield f'{code.co_qualname}.{name}', one

    def _changed(self, room: list[int] | None = None) -> dict[str, Any]:
        marks, saved = self._marks or {}, (self._saved.get(one, {}) for one in ('epoch', 'loop'))
        before = {path: packed for moment in saved for path, packed in moment.items()}
        found = {}
        for path, one in self._variables():
            if not may_be_saved(one):
                continue
            if room is not None and is_large(one):
                raise _NotPlain('large variable')
            then, unchanged = marks.get(path), list[str]()
            if path not in before and path in marks:
                # Modules that are not prepared must not change.
                if isinstance(one, torch.nn.Module) or then == (now := mark(one)):
                    continue
                if isinstance(then, dict) and isinstance(now, dict):
                    unchanged = [key for key in now if then.get(key) == now[key]]
            with suppress(_NotPlain):
                found[path] = _packed(one, self._live, unchanged, room)
        return found


class _NotPlain(Exception):
    """Names the class of what cannot be saved."""


@lru_cache(maxsize=256)
def live_names(code: CodeType, at: int) -> frozenset[str]:
    """The variables of a function whose values may be read from an instruction on, before they are
    set; those that inner functions share count always.
    """
    steps = list(dis.get_instructions(code))
    place = {step.offset: i for i, step in enumerate(steps)}
    after: list[list[int]] = []
    for i, step in enumerate(steps):
        jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
        then = [place[step.argval]] if jumps else []
        if step.opname not in (*_ENDS, *_JUMPS) and i + 1 < len(steps):
            then.append(i + 1)
        after.append(then)
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2):
            if offset in place:
                after[place[offset]].append(place[entry.target])
    found: list[set[str]] = [set() for _ in steps]
    changes = True
    while changes:
        changes = False
        for i in reversed(range(len(steps))):
            now = set().union(*(found[j] for j in after[i]))
            kinds = re.findall(r'(LOAD|STORE|DELETE)_FAST', steps[i].opname)
            names = steps[i].argval if isinstance(steps[i].argval, tuple) else (steps[i].argval,)
            for kind, name in reversed([*zip(kinds, names, strict=False)]):
                now = now | {name} if kind == 'LOAD' else now - {name}
            if now != found[i]:
                found[i], changes = now, True
    # In a call, a frame is at the memory of the instruction, which is behind it.
    here = max((offset for offset in place if offset <= at), default=0)
    return frozenset(found[place[here]] | {*code.co_cellvars, *code.co_freevars})


def _frames() -> list[FrameType]:
    """The user's functions that have called us, the nearest first."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get('__name__', ''))
        if module in (f'{_OURS}training.loop.rank', f'{_OURS}training.loop.debugging'):
            return found
        if not (module.startswith(_OURS) or frame.f_code.co_filename.startswith(LIBRARIES)):
            found.append(frame)
        frame = frame.f_back
    return []


def _packed(
    one: Any, live: list[torch.Tensor], unchanged: Iterable[str] = (), room: list[int] | None = None
) -> Any:
    """A value in a form that checkpoints hold, without the ``unchanged`` attributes of an object.
    Of ``live`` tensors, which are saved already, it is their number. Raises _NotPlain.
    """
    numbers: dict[int, int] = {}
    room = [_MOST, _MOST_BYTES] if room is None else room

    def pack(one: Any, top: bool = False) -> Any:
        kind = type(one)
        plain_list = kind is list and {*map(type, one)} <= {*SCALARS}
        room[0] -= 1 + (len(one) if plain_list else 0)
        if room[0] < 0:
            raise _NotPlain('long list')
        if kind in SCALARS:
            return one
        if plain_list:
            return 'list', [*one]
        if isinstance(one, torch.Tensor) and not numbers:
            numbers.update(
                (t.data_ptr(), i) for i, t in enumerate(live) if is_plain(t) and t.numel()
            )
        if isinstance(one, torch.Tensor) and is_plain(one) and one.data_ptr() in numbers:
            i = numbers[one.data_ptr()]
            if one.shape != live[i].shape:
                raise _NotPlain('part of a model')
            return 'live', i, one is live[i]
        if isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad:
            raise _NotPlain('tensor that is trained')
        room[1] -= getattr(one, 'nbytes', 0) if isinstance(one, (torch.Tensor, np.ndarray)) else 0
        if room[1] < 0:
            raise _NotPlain('large tensor')
        if isinstance(one, torch.Tensor):
            plain = one.detach().clone()
            return plain if plain.device.type == 'cpu' else ('device', plain)
        if isinstance(one, np.ndarray) and one.dtype.kind in 'biufc':
            return 'numpy', torch.from_numpy(one.copy())
        if isinstance(one, np.generic):
            return pack(one.item())
        if isinstance(one, deque):
            return 'deque', [pack(value) for value in one], one.maxlen
        if kind in (OrderedDict, Counter) or isinstance(one, dict):
            plain_kind = kind if kind in (OrderedDict, Counter) else dict
            return 'dict', plain_kind({key: pack(value) for key, value in one.items()})
        if kind in (list, set):
            return kind.__name__, [pack(value) for value in one]
        if kind is tuple:
            return 'tuple', [pack(value) for value in one]
        if top and has_state(one):
            return 'state', pack(one.state_dict())
        if top and (own := attributes(one)) is not None:
            found = {}
            for key, value in own.items():
                with suppress(_NotPlain):
                    if key not in unchanged:
                        found[key] = pack(value)
            return 'object', found
        raise _NotPlain(kind.__name__)

    return pack(one, top=True)


def _is_state(packed: Any) -> bool:
    return isinstance(packed, tuple) and packed[0] == 'state'


def _unpacked(packed: Any, now: Any, live: list[torch.Tensor], device: torch.device) -> Any:
    """The value, in the place of ``now`` where that is of its kind: others may refer to it."""
    if isinstance(packed, torch.Tensor):
        kind = packed.shape, packed.dtype
        alike = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == kind
        taken = alike and not (now.requires_grad or now.is_inference())
        return now.copy_(packed) if taken else packed.clone()
    if not isinstance(packed, tuple):
        return packed
    kind, inner = packed[:2]
    if kind == 'live':
        return live[inner] if packed[2] else live[inner].detach()
    if kind == 'device':
        return _unpacked(inner, now, live, device).to(device)
    if kind == 'numpy':
        array = inner.numpy()
        if isinstance(now, np.ndarray) and (now.shape, now.dtype) == (array.shape, array.dtype):
            now[...] = array
            return now
        return array.copy()
    if kind == 'state':
        if has_state(now):
            now.load_state_dict(_unpacked(inner, None, live, device))
        return now
    if kind == 'object':
        own = getattr(now, '__dict__', {})
        for key, value in inner.items():
            if key in own:
                setattr(now, key, _unpacked(value, own[key], live, device))
        return now
    if kind == 'dict':
        new = type(inner)({key: _unpacked(one, None, live, device) for key, one in inner.items()})
        if isinstance(now, dict):
            now.clear()
            now.update(new)
            return now
        return new
    values = [_unpacked(one, None, live, device) for one in inner]
    if kind == 'tuple':
        return tuple(values)
    if isinstance(now, (list, deque)) and kind in ('list', 'deque'):
        now.clear()
        now.extend(values)
        return now
    if kind == 'set':
        return set(values)
    return deque(values, packed[2]) if kind == 'deque' else values
