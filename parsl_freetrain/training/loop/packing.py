"""Values of variables in a form that checkpoints hold, and back."""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from itertools import zip_longest
from pathlib import PosixPath, WindowsPath
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.module_state import (
    buffers_beside,
    set_buffers,
    set_settings,
    settings_of,
)
from parsl_freetrain.training.loop import changes
from parsl_freetrain.training.loop.places import OF_TORCH
from parsl_freetrain.training.steps.buffers import is_plain

_SCALARS = frozenset(changes.SCALARS)
_BASES = Counter, OrderedDict, dict, list, set, tuple
_NUMPY = np.float64, np.float32, np.float16, np.int64, np.int32  # they are computed otherwise
_CONSTANTS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*changes.VALUES[:-1], *_NUMPY, datetime, PosixPath, WindowsPath)
}
_MADE_BY = {kind.__name__: kind for kind in (*_BASES, *changes.SCALARS[:5], defaultdict, deque)}
_WORDS = torch.device, torch.dtype
_SPARSE = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc
_MOST, _MOST_BYTES = 10**7, 2**34  # elements and bytes of what is saved of a variable


@dataclass
class How:
    """``live``: tensors saved as numbers; ``known``: saved objects; ``find``: classes by name;
    ``models``: those that are trained, of which there may be copies; ``ids_now``: of their tensors
    and modules, and ``ids``: by those where a state was saved (of ``slow[id(parameter)]``).
    """

    live: list[torch.Tensor]
    known: set[int]
    find: Callable[[str], Any]
    device: torch.device
    models: Sequence[torch.nn.Module] = ()
    ids_now: Sequence[int] = ()
    ids: Mapping[int, int] = field(default_factory=dict)

    def functions(self, name: str) -> list[Any]:  # the user's and torch's
        return [self.find(name), *(getattr(of, name, None) for of in (torch, torch.nn.functional))]

    def where(self, ids: Sequence[int]) -> 'How':
        return replace(self, ids=dict(zip(ids, self.ids_now, strict=False)))


class NotPlain(Exception):
    """Says what it is that cannot be saved."""


class TooLarge(NotPlain):
    """Or it is of a kind that cannot be saved, wherever it comes from."""


def packed(
    one: Any, how: How, unchanged: Collection[Any] = (), room: list[int] | None = None
) -> Any:
    """A value as checkpoints hold it, without ``unchanged`` attributes, within ``room`` (elements,
    bytes); NotPlain if it cannot be saved and is not made again, as elements are of a container
    whose id is in ``unchanged``.
    """
    room = [_MOST, _MOST_BYTES] if room is None else room
    return _Packer(how, unchanged, room).pack(one, True)


class _Packer:
    def __init__(self, how: How, unchanged: Collection[Any], room: list[int]) -> None:
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
        name, inner = type(one).__name__, one.values() if isinstance(one, dict) else one
        again = id(one) in self._unchanged
        plain = _SCALARS.issuperset(map(type, inner))
        self._take(len(one) if plain else 0, 0)
        if isinstance(one, dict):
            plain_keys = _SCALARS.issuperset(map(type, one))
            one_of = one if plain_keys else {plain_key(key): one[key] for key in one}
            found = dict(one_of) if plain else self._parts(one_of, there or again, again)
            content: Any = 'dict' if len(found) == len(one) else 'items', _base(one)(found)
        else:
            if again and not plain and type(one) in (list, tuple, deque):
                return 'items', self._parts(dict(enumerate(inner)), True, True)
            values = [*inner] if plain else [*map(self.pack, inner)]
            content = 'deque', values, one.maxlen if isinstance(one, deque) else None
            if not isinstance(one, deque):
                content = _base(one).__name__, values
        if type(one) is OrderedDict and vars(one):  # a nested TensorDict needs what is beside it
            return 'made', content, name, self._parts(vars(one), there)
        if type(one) in (*_BASES, deque, torch.Size):
            return content
        if type(one) is defaultdict:
            factory = one.default_factory
            made_by = '' if factory is None else getattr(factory, '__name__', '?')
            if factory is not None and factory is not _MADE_BY.get(made_by):
                if not there:
                    raise NotPlain('a defaultdict of a function')
                made_by = '?'
            return 'made', content, name, made_by
        if self._how.find(name) is not type(one):
            raise NotPlain(f'a {name}')
        return 'made', content, name, self._parts(changes.attributes(one) or {}, there, there)

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

    def _sparse(self, one: torch.Tensor) -> Any:
        if one.layout not in _SPARSE or one.requires_grad:
            raise TooLarge(f'a tensor of layout {one.layout}')
        listed = one.to_sparse_coo().coalesce()
        parts = [self.pack(listed.indices()), self.pack(listed.values())]
        return 'sparse', parts, [*one.shape], _SPARSE.index(one.layout)

    def pack(self, one: Any, there: bool = False) -> Any:
        if isinstance(one, torch.Tensor) and one.layout is not torch.strided:
            return self._sparse(one)
        self._take(1, one.nbytes if isinstance(one, (torch.Tensor, np.ndarray)) else 0)
        if type(one) in _SCALARS or isinstance(one, _WORDS):
            return one
        if isinstance(one, torch.Tensor):
            return self._tensor(one)
        if isinstance(one, np.ndarray) and one.dtype.kind in 'biufc':
            return 'numpy', torch.from_numpy(one.copy())
        if isinstance(one, np.generic) and type(one) not in _NUMPY:
            return self.pack(one.item())
        if isinstance(one, (*changes.VALUES, *_NUMPY)):
            return self._constant(one)
        if id(one) in self._around:
            raise NotPlain('what refers to itself')
        self._around.add(id(one))
        try:
            if isinstance(one, changes.CONTAINERS):
                return self._container(one, there)
            return self._thing(one, there)
        finally:
            self._around.remove(id(one))

    def _constant(self, one: Any) -> Any:
        name, parts = type(one).__name__, [one]
        if isinstance(one, Enum):
            if self._how.find(name) is not type(one):
                raise NotPlain(f'a {name}')
            parts = [one.value]
        elif isinstance(one, complex):
            parts = [one.real, one.imag]
        elif isinstance(one, np.generic):
            parts = [one.item()]
        else:
            parts = [*one.__reduce__()[1]]
        return 'constant', [*map(self.pack, parts)], name

    def _thing(self, one: Any, there: bool) -> Any:
        top, name, own = self._around == {id(one)}, type(one).__name__, changes.attributes(one)
        if isinstance(one, changes.FUNCTIONS) and one in self._how.functions(one.__name__):
            return 'function', one.__name__, self._how.functions(one.__name__).index(one)
        if getattr(torch.nn, name, None) is type(one) and not (one.state_dict() or one._modules):
            # A loss or an activation, of another kind perhaps than where training began.
            its = {k: v for k, v in vars(one).items() if k == 'training' or k not in OF_TORCH}
            return 'module', name, self._parts(its, False), [*one._parameters, *one._buffers]
        if changes.has_state(one) and id(one) not in self._how.known:
            module, models = isinstance(one, torch.nn.Module), enumerate(self._how.models)
            same = (i for i, m in models if type(one) in type(m).__mro__[:2] and alike(m, one))
            copy_of = next(same, -1)
            if top or copy_of >= 0 or (there and not module):
                buffers = self.pack(buffers_beside(one)) if module else ('dict', {})
                settings = settings_of([one]) if module else {}
                return 'state', self.pack(changes.state_of(one)), copy_of, settings, buffers
        if own is None or changes.has_state(one) or isinstance(one, (Dataset, torch.nn.Module)):
            raise NotPlain(f'a {name}')
        if not there and self._how.find(name) is not type(one):
            raise NotPlain(f'a {name}')
        changed = {key: value for key, value in own.items() if not (top and key in self._unchanged)}
        return 'object', self._parts(changed, there, there), name


def alike(*modules: torch.nn.Module) -> bool:
    """Whether two have the same names and shapes in their states."""
    one, other = (
        {name: getattr(value, 'shape', None) for name, value in module.state_dict().items()}
        for module in modules
    )
    return one == other


def _base(one: Any) -> Any:
    return next(base for base in _BASES if isinstance(one, base))


def plain_key(key: Any) -> Any:
    """A name in a dict as a checkpoint holds it. Raises NotPlain for one that it cannot hold."""
    if type(key) is tuple:
        return tuple(map(plain_key, key))
    if isinstance(key, np.generic):
        return key.item()
    if type(key) not in _SCALARS and not isinstance(key, _WORDS):
        raise NotPlain(f'a {type(key).__name__} as a key')
    return key


def unpacked(packed: Any, now: Any, how: How) -> Any:
    """The value, in the place of ``now`` if of its kind, as others may refer to it."""
    return _Unpacker(how).unpack(packed, now)


class _Unpacker:
    def __init__(self, how: How) -> None:
        self._how, self._used = how, set[int]()

    def unpack(self, packed: Any, now: Any = None) -> Any:
        if isinstance(packed, torch.Tensor):
            kind = packed.shape, packed.dtype
            alike = isinstance(now, torch.Tensor) and (now.shape, now.dtype) == kind
            taken = alike and not (now.requires_grad or now.is_inference() or self._is_live(now))
            return now.copy_(packed) if taken else packed.clone()
        if not isinstance(packed, tuple):
            return self._how.ids.get(packed, packed) if type(packed) is int else packed
        kind, inner = packed[:2]
        if kind == 'live':
            return self._how.live[inner] if packed[2] else self._how.live[inner].detach()
        if kind == 'device':
            return self.unpack(inner, now).to(self._how.device)
        if kind == 'sparse':
            indices, values = map(self.unpack, inner)
            listed = torch.sparse_coo_tensor(indices, values, packed[2], is_coalesced=True)
            return listed.to_sparse(layout=_SPARSE[packed[3]])
        if kind == 'numpy':
            array = inner.numpy()
            if isinstance(now, np.ndarray) and (now.shape, now.dtype) == (array.shape, array.dtype):
                now[...] = array
                return now
            return array.copy()
        if kind == 'state':
            if packed[2] >= 0 and (id(now) in self._how.known or not changes.has_state(now)):
                now = copy.deepcopy(self._how.models[packed[2]])
            if changes.has_state(now):
                try:
                    changes.load_state(now, self.unpack(inner))
                except Exception as error:
                    raise BadInput(
                        f'A variable holds a {type(now).__name__}, which does not take back its '
                        f'state of the checkpoint ({type(error).__name__}: {error}): make it as it '
                        'was when its state was saved, or use it in functions of ctx.after_step or '
                        'ctx.each_epoch.'
                    ) from error
            if isinstance(now, torch.nn.Module):
                set_settings([now], packed[3] if packed[3:] else {})
                set_buffers([now], self.unpack(packed[4]) if packed[4:] else {})
            return now
        if kind == 'function':
            return self._how.functions(inner)[packed[2]] or self._class(inner)
        if kind == 'module':
            return self._module(now, *packed[1:])
        if kind == 'constant':
            return (_CONSTANTS.get(packed[2]) or self._class(packed[2]))(*map(self.unpack, inner))
        if kind == 'made':
            return self._made(inner, now, *packed[2:])
        if kind == 'object':
            return self._object(inner, now, packed[2])
        if kind == 'items':
            olds = now if isinstance(now, dict) else dict(enumerate(now or ()))
            for key, value in inner.items() if isinstance(now, changes.CONTAINERS) else ():
                key = self._how.ids.get(key, key)
                new = self.unpack(value, olds.get(key))
                if not isinstance(now, (tuple, set)):
                    now[key] = new
            return now
        return self._container(packed, now)

    def _module(self, now: Any, name: str, settings: dict[str, Any], empty: list[str]) -> Any:
        if type(now) is not (kind := getattr(torch.nn, name)):
            now = kind.__new__(kind)
            torch.nn.Module.__init__(now)
            now._buffers.update(dict.fromkeys(empty))
        vars(now).update({key: self.unpack(value) for key, value in settings.items()})
        return now

    def _is_live(self, one: torch.Tensor) -> bool:
        """Whether it is, or is a part of, what is trained."""
        live = (t.data_ptr() for t in self._how.live if is_plain(t))
        return is_plain(one) and one.data_ptr() in live

    def _object(self, inner: dict[str, Any], now: Any, name: str) -> Any:
        one = object.__new__(self._class(name)) if changes.attributes(now) is None else now
        own = changes.attributes(one) or {}
        for key, value in inner.items():
            if key in own or type(one).__name__ == name:
                object.__setattr__(one, key, self.unpack(value, own.get(key)))
        return one

    def _class(self, name: str) -> Any:
        if (kind := self._how.find(name)) is None:
            raise BadInput(
                f'A variable held an object of class {name} when the checkpoint was written, and '
                'the function does not know this class any more: define or import it by name.'
            )
        return kind

    def _made(self, content: Any, now: Any, name: str, more: Any) -> Any:
        if content[0] == 'tuple':
            values, kind = self.unpack(content), self._class(name)
            return kind(*values) if hasattr(kind, '_fields') else kind(values)
        if type(now).__name__ != name:
            if more == '?':
                raise BadInput(
                    'A variable held a defaultdict of a function, which a fragment cannot make '
                    'again where the variable is set later: use defaultdict(int), (float) or '
                    '(list), or make it before ctx.loop.'
                )
            kind = _MADE_BY[name] if name in ('defaultdict', 'OrderedDict') else self._class(name)
            now = kind.__new__(kind)
            if kind is defaultdict:
                now.default_factory = _MADE_BY.get(more)
        self.unpack(content, now)
        own = changes.attributes(now) or {}
        for key, value in more.items() if isinstance(more, dict) else ():
            object.__setattr__(now, key, self.unpack(value, own.get(key)))
        return now

    def _inner(self, packed: Any, now: Any) -> Any:
        """A tensor or array in a container may be anybody's, and a thing be there twice."""
        named = isinstance(packed, tuple) and packed[0] in ('object', 'made')
        kind = packed[2] if named else ''
        same = type(now).__name__ == kind if kind else isinstance(now, changes.CONTAINERS)
        taken = same and id(now) not in self._used
        self._used.add(id(now))
        return self.unpack(packed, now if taken else None)

    def _container(self, packed: Any, now: Any) -> Any:
        kind, inner = packed[:2]
        if kind == 'dict':
            old = now if isinstance(now, dict) else {}
            named = ((self._how.ids.get(key, key), one) for key, one in inner.items())
            new = type(inner)({key: self._inner(one, old.get(key)) for key, one in named})
            if not isinstance(now, dict):
                return new
            dict.clear(now)
            kind = OrderedDict if isinstance(now, OrderedDict) else dict
            kind.update(now, new)
            return now
        olds = [*now][: len(inner)] if isinstance(now, (list, tuple, deque)) else []
        values = [self._inner(one, old) for one, old in zip_longest(inner, olds)]
        base: Any = {'list': list, 'deque': deque, 'set': set}.get(kind)
        if base is not None and isinstance(now, base):
            base.clear(now)
            (base.update if base is set else base.extend)(now, values)
            return now
        if kind == 'deque':
            return deque(values, packed[2])
        return values if kind == 'list' else tuple(values) if kind == 'tuple' else set(values)
