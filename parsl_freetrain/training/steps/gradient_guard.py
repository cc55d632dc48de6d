"""Notices when the user's loop reads or changes gradients of which it has only a part."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NoReturn

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import is_divided, local
from parsl_freetrain.training.steps import backward

OF_A_SHARD = 'In reproducible mode it is the gradient of a virtual shard there'

CHANGED = 'A gradient was changed between backward() and optimizer.step(), as clip_grad_norm_ does'
_READ = 'The body of ctx.loop read the gradient of a parameter after backward()'
OFFER = (
    'say ctx.prepare(..., clip_grad_norm=...) to clip the gradient of the global batch, and read '
    'it or change it in any other way in ctx.before_step(fn).'
)
_NO_USERS = ('torch', 'parsl_freetrain')
"""Packages that may read gradients: optimizers clear them, and changes are noticed."""

_TENSOR: Any = torch.Tensor
grad_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter('_grad')
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _TENSOR.grad.__set__
"""A parameter's own gradient, whatever its class says."""
_version_of: Callable[[torch.Tensor], int] = attrgetter('_version')
_Seen = tuple[list[int], list[int]]  # identities of gradients, and versions of those there
_Taken = list[tuple[Sequence[torch.nn.Parameter], list[torch.Tensor | None], dict[int, int]]]
"""Parameters, their gradients, and their places by identity, once one was looked for."""

_CLEARING = (_TENSOR.zero_, _TENSOR.requires_grad_, _TENSOR.data.__get__, _TENSOR.grad_fn.__get__)
"""What loops that clear gradients by hand call."""
_PARAMETER: Any = torch.nn.Parameter


class GradientGuard:
    """Notices whether gradients are as backward() has left them: what is not linear in one of
    several micro-batches' (clipping) would give another result. In micro-batches, ``grad`` of
    torch's Parameter asks the guard. It refuses to other packages than torch all but clearing, and
    remembers the gradients as they were before somebody got hold of one. So nothing is done for
    each of them where nobody does. Those of other classes, such as sharded ones, are always
    remembered, and the latter compared by norms.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], whose: str = OF_A_SHARD) -> None:
        self._whose = whose
        self._taken: _Taken = []
        self._unreadable = unreadable(f'{_READ}. {whose}: {OFFER}')
        self._grad = property(self._read, self._set, self._set)
        self._watched, self._hooked = dict[int, torch.nn.Parameter](), set[int]()
        self._left: _Seen | None = None
        self._done: list[torch.Tensor] = []  # sharded parameters of a backward()
        self._norms: dict[int, torch.Tensor] = {}
        self._changed: list[torch.Tensor] = []
        # On: the batch has other micro-batches. Passed: backward() has run. Known: somebody may
        # have got hold of a gradient. Some: there may be one.
        self._on = self._passed = self._known = False
        self._some = True
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
        asked = _PARAMETER.grad
        self._others = any(
            _PARAMETER not in (kind := type(p)).__mro__ or kind.grad is not asked
            for p in self._parameters
        )
        backward.watch()

    def begin_micro_batch(self, of_several: bool) -> None:
        """Call before a micro-batch, without gradients; ``of_several``: there are other ones."""
        self._left = None
        self._done.clear()
        self._norms, self._on = {}, of_several
        self._passed = self._some = False
        self._known = self._others
        backward.around['gradients'] = self._around
        _PARAMETER.grad = self._grad

    def check(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Call before gradients are taken; BadInput if one was changed after backward()."""
        left = self._left
        if left is not None and left != (now := _seen(self._now())):
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

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """:meth:`check` gradients and take them, unseen by readers until the micro-batch ends."""
        with torch._C.DisableTorchFunctionSubclass():  # else each is asked for its own functions
            self.check(parameters)
            gradients = list(map(grad_of, parameters))
            deque(map(set_grad, parameters, repeat(None)), 0)
        self._taken.append((parameters, gradients, {}))
        self._some &= parameters is not self._whole
        return gradients

    @property
    def none_left(self) -> bool:
        """Whether no parameter can have a gradient: all have been taken, and none was set since."""
        return not (self._some or self._others)

    def changed(self) -> torch.Tensor | None:
        """Whether a sharded gradient has changed since, as a number on the device, or None."""
        flags, self._changed = self._changed, []
        return torch.stack(flags).any() if flags else None

    def refuse(self) -> NoReturn:
        raise BadInput(f'{CHANGED}. {self._whose}: {OFFER}')

    def end_micro_batch(self) -> None:
        if 'grad' in vars(_PARAMETER):
            del _PARAMETER.grad
        self._taken.clear()
        self._some = True
        backward.around.pop('gradients', None)

    def _now(self) -> list[torch.Tensor | None]:
        return list(map(grad_of, self._parameters))

    def _around(self) -> Callable[[], None]:
        """Before a backward(); what it returns comes after it."""
        left, self._some = self._left, True
        before = None if left is None else _seen(self._now())

        def after() -> None:
            self._passed = True
            if self._known:
                self._left = now = _seen(self._now())
                if left is not None and before is not None and left != before:
                    # What changed before, and was not added to, is still changed.
                    each = zip(_pairs(left), _pairs(before), _pairs(now), strict=True)
                    kept = [was if b == n else n for was, b, n in each]
                    self._left = [i for i, _ in kept], [v for _, v in kept if v >= 0]
            if self._on and self._done:
                self._note_norms()

        return after

    @torch.no_grad()
    def _note_norms(self) -> None:
        given = [(id(parameter), grad_of(parameter)) for parameter in self._done]
        self._done.clear()
        if there := {i: gradient for i, gradient in given if gradient is not None}:
            self._norms.update(zip(there, _norms_of(there.values()), strict=True))

    def _remember(self) -> None:
        self._known = True
        if self._passed and self._left is None:
            self._left = _seen(self._now())

    def _read(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        found = grad_of(parameter)
        if id(parameter) not in self._watched or 'gradients' not in backward.around:
            return found  # it is another's, or the body was left
        if found is not None:
            self._remember()
        elif not self._taken:
            return None
        if sys._getframe(1).f_globals.get('__name__', '').partition('.')[0] in _NO_USERS:
            return found
        if found is None and (at := self._place(parameter)) and (own := at[0][at[1]]) is not None:
            found = own.clone()  # whatever is done to it, the sum stays
        if found is None or not (self._on and (self._passed or self._taken)):
            return found
        return found.as_subclass(self._unreadable)

    def _set(self, parameter: torch.nn.Parameter, value: torch.Tensor | None = None) -> None:
        if id(parameter) in self._watched:
            if self._passed or value is not None:
                self._remember()
            self._some |= value is not None
            if at := self._place(parameter):
                at[0][at[1]] = None
        set_grad(parameter, value)

    def _place(self, parameter: torch.Tensor) -> tuple[list[torch.Tensor | None], int] | None:
        for parameters, own, places in self._taken:
            if not places:
                places.update((id(one), i) for i, one in enumerate(parameters))
            if (at := places.get(id(parameter))) is not None:
                return own, at
        return None


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


def _seen(gradients: Sequence[torch.Tensor | None]) -> _Seen:
    there: Any = [gradient for gradient in gradients if gradient is not None]
    return list(map(id, gradients)), list(map(_version_of, there))


def _pairs(seen: _Seen) -> list[tuple[int, int]]:
    """Identity and version of each gradient; -1: there is none."""
    versions = iter(seen[1])
    return [(i, -1 if i == id(None) else next(versions)) for i in seen[0]]


def _norms_of(gradients: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch._foreach_norm([local(g) for g in gradients], dtype=torch.float64)


def unreadable(sentence: str) -> type[torch.Tensor]:
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

    return Unreadable
