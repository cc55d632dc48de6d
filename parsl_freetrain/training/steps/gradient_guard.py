"""Notices when the user's loop reads or changes gradients of which it has only a part."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NoReturn

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import is_divided, local
from parsl_freetrain.training.steps import backward

OF_A_SHARD = 'In reproducible mode it is the gradient of a virtual shard there'

_CHANGED = 'A gradient was changed between backward() and optimizer.step(), as clip_grad_norm_ does'
_READ = 'The body of ctx.loop read the gradient of a parameter after backward()'
_OFFER = (
    'say ctx.prepare(..., clip_grad_norm=...) to clip the gradient of the global batch, and read '
    'it or change it in any other way in ctx.before_step(fn).'
)
_NO_USERS = ('torch', 'parsl_freetrain')
"""Packages that may read gradients: optimizers clear them, and changes are noticed."""

_TENSOR: Any = torch.Tensor
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = _TENSOR.grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _TENSOR.grad.__set__
"""A parameter's own gradient, whatever its class says."""
_version_of: Callable[[torch.Tensor], int] = _TENSOR._version.__get__
_Seen = tuple[list[int], list[int]]  # identities of gradients, and versions of those there
_Taken = list[tuple[Sequence[torch.nn.Parameter], list[torch.Tensor | None], dict[int, int]]]
"""Parameters, their gradients, and their places by identity, once one was looked for."""

_CLEARING = (_TENSOR.zero_, _TENSOR.requires_grad_, _TENSOR.data.__get__, _TENSOR.grad_fn.__get__)
"""What loops that clear gradients by hand call."""


class GradientGuard:
    """Remembers each gradient as backward() left it: what is not linear in one of several
    micro-batches' (clipping) would give another result. Until the micro-batch ends, parameters have
    a class that refuses to other packages all but clearing; sharded ones are compared by norms.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], whose: str = OF_A_SHARD) -> None:
        self._whose = whose
        self._taken: _Taken = []
        self._held: list[torch.Tensor | None] = []  # those of all parameters, if none was set since
        self._class = _unreadable(f'{_READ}. {whose}: {_OFFER}', self._taken, self._held)
        self._watched, self._hooked = dict[int, torch.nn.Parameter](), set[int]()
        self._left: _Seen | None = None
        self._done: list[torch.Tensor] = []  # sharded parameters of a backward()
        self._norms: dict[int, torch.Tensor] = {}
        self._changed: list[torch.Tensor] = []
        self._unreadable: list[list[torch.nn.Parameter]] = []
        self._on = self._taken_last = False
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        whole = tuple(parameters)
        for parameter in whole:
            hooked = id(parameter) in self._hooked or not is_divided(parameter)
            if not hooked and parameter.requires_grad:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._done.append)
            self._watched[id(parameter)] = parameter
        self._parameters = [*self._watched.values()]
        self._whole = whole if len(whole) == len(self._parameters) else None
        backward.watch()

    def begin_micro_batch(self, of_several: bool) -> None:
        """Call before a micro-batch; ``of_several``: whether the global batch has other ones."""
        self._left = None
        self._done.clear()
        self._norms, self._on = {}, of_several
        self._class.of_several = of_several
        self._class.was_set = False
        self._held.clear()
        backward.around['gradients'] = self._around

    def check(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Call before gradients are taken; BadInput if one was changed after backward()."""
        self._check(parameters, list(map(grad_of, self._parameters)))

    def _check(
        self, parameters: Sequence[torch.nn.Parameter], every: list[torch.Tensor | None]
    ) -> bool:
        """Also returns whether other gradients than backward() left are there."""
        left, now = self._left, _seen(every)
        if left is not None and left != now:
            taken, each = set(map(id, parameters)), zip(_pairs(left), _pairs(now), strict=True)
            for parameter, (before, after) in zip(self._watched, each, strict=True):
                known = before[1] >= 0 and after[1] >= 0
                if known and before != after and parameter in taken:
                    self.refuse()
        given = [(p, grad_of(p)) for p in parameters if id(p) in self._norms] if self._norms else []
        if divided := [(self._norms[id(p)], g) for p, g in given if g is not None]:
            norms = [norm for norm, _ in divided], _norms_of([gradient for _, gradient in divided])
            # Not by their values, as NaN does not equal itself.
            earlier, later = (torch.stack(list(one)).view(torch.int64) for one in norms)
            self._changed.append(earlier.ne(later).any())
        return left != now

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """:meth:`check` gradients and take them, unseen by readers until the micro-batch ends."""
        with torch._C.DisableTorchFunctionSubclass():  # else each is asked for its own functions
            every = [*self._held] or list(map(grad_of, self._parameters))
            changed = self._check(parameters, every)
            # The very same ones, but for those of several optimizers.
            gradients = every if parameters is self._whole else list(map(grad_of, parameters))
            deque(map(set_grad, parameters, repeat(None)), 0)
        if changed or not self._on:
            self._hide(parameters, gradients)
        self._held.clear()
        self._taken.append((parameters, gradients, {}))
        self._taken_last = parameters is self._whole
        return gradients

    @property
    def none_left(self) -> bool:
        """Whether no parameter can have a gradient: all have been taken, and none was set since."""
        return self._taken_last and self._all_hidden and not self._class.was_set

    @property
    def _all_hidden(self) -> bool:
        return sum(map(len, self._unreadable)) == len(self._parameters)

    def _hide(
        self, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        plain = torch.nn.Parameter
        both = zip(parameters, gradients, strict=True)
        hidden = [p for p, g in both if p.__class__ is plain and g is not None]
        deque(map(setattr, hidden, repeat('__class__'), repeat(self._class)), 0)
        self._unreadable.append(hidden)

    def changed(self) -> torch.Tensor | None:
        """Whether a sharded gradient has changed since, as a number on the device, or None."""
        flags, self._changed = self._changed, []
        return torch.stack(flags).any() if flags else None

    def refuse(self) -> NoReturn:
        raise BadInput(f'{_CHANGED}. {self._whose}: {_OFFER}')

    def end_micro_batch(self) -> None:
        for hidden in self._unreadable:
            deque(map(setattr, hidden, repeat('__class__'), repeat(torch.nn.Parameter)), 0)
        self._unreadable.clear()
        self._taken.clear()
        self._held.clear()
        backward.around.pop('gradients', None)

    def _around(self) -> Callable[[], None]:
        """Before a backward(); what it returns comes after it."""
        left, before = self._left, None
        self._taken_last = False
        self._held.clear()
        if left is not None:
            before = _seen(list(map(grad_of, self._parameters)))

        def after() -> None:
            gradients = list(map(grad_of, self._parameters))
            self._left = now = _seen(gradients)
            if left is not None and before is not None and left != before:
                # What changed before, and was not added to, is still changed.
                each = zip(_pairs(left), _pairs(before), _pairs(now), strict=True)
                kept = [was if b == n else n for was, b, n in each]
                self._left = [i for i, _ in kept], [version for _, version in kept if version >= 0]
            if self._on:
                self._hide(self._parameters, gradients)
                if self._done:
                    self._note_norms()
                self._held[:] = gradients if self._all_hidden else ()

        return after

    @torch.no_grad()
    def _note_norms(self) -> None:
        given = [(id(parameter), grad_of(parameter)) for parameter in self._done]
        self._done.clear()
        if there := {i: gradient for i, gradient in given if gradient is not None}:
            self._norms.update(zip(there, _norms_of(there.values()), strict=True))


def in_graphs() -> bool:
    """Whether gradients may be in memory of torch.compile's CUDA graphs, to be overwritten."""
    return 'torch._inductor.cudagraph_trees' in sys.modules


def refuse_overwritten(
    earlier: Sequence[torch.Tensor], later: Sequence[torch.Tensor], only: int | None = None
) -> None:
    """Raises BadInput if gradients of two passes are in the same memory; ``only`` of one place."""
    for i in range(len(earlier)) if only is None else (only,):
        one, other = local(earlier[i]), local(later[i])
        if one.layout is torch.strided and one.numel() and one.data_ptr() == other.data_ptr() != 0:
            raise BadInput(
                'A gradient is in memory that the next backward pass overwrites, as with '
                'torch.cuda.make_graphed_callables, so those of several virtual shards or '
                "micro-batches cannot be added up: use torch.compile(model, mode='reduce-overhead')"
                ' for CUDA graphs, or one pass in each step (mode=Reproducible(shards=1)).'
            )


_NONE = id(None)


def _seen(gradients: Sequence[torch.Tensor | None]) -> _Seen:
    there: Any = [gradient for gradient in gradients if gradient is not None]
    return list(map(id, gradients)), list(map(_version_of, there))


def _pairs(seen: _Seen) -> list[tuple[int, int]]:
    """Identity and version of each gradient; -1: there is none."""
    versions = iter(seen[1])
    return [(i, -1 if i == _NONE else next(versions)) for i in seen[0]]


def _norms_of(gradients: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_norm([local(g) for g in gradients], dtype=torch.float64)


def _unreadable(sentence: str, taken: _Taken, held: list[torch.Tensor | None]) -> Any:
    def place(parameter: torch.nn.Parameter) -> tuple[list[torch.Tensor | None], int] | None:
        for parameters, own, places in taken:
            if not places:
                places.update((id(one), i) for i, one in enumerate(parameters))
            if (at := places.get(id(parameter))) is not None:
                return own, at
        return None

    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.Tensor.detach_:  # it is detached, and this view of it cannot be
                return args[0]
            if func not in _CLEARING:
                raise BadInput(sentence)
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    class UnreadableGrad(torch.nn.Parameter):
        of_several, was_set = True, False

        @property
        def grad(self) -> torch.Tensor | None:
            found: torch.Tensor | None = grad_of(self)
            reader = sys._getframe(1).f_globals.get('__name__', '')
            if reader.partition('.')[0] in _NO_USERS:
                return found
            if found is None and (at := place(self)) and (own := at[0][at[1]]) is not None:
                found = own.clone()  # whatever is done to it, the sum stays
            if found is None or not self.of_several:
                return found
            return found.as_subclass(Unreadable)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            if at := place(self):
                at[0][at[1]] = None
            type(self).was_set = True
            held.clear()
            set_grad(self, value)

        @grad.deleter
        def grad(self) -> None:
            held.clear()
            set_grad(self, None)

        def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
            copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    return UnreadableGrad
