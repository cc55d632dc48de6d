"""Notices when the user's loop reads or changes gradients of which it has only a part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.training.checkpoint.local_shard import is_divided, local

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
_at_the_end: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Runs a function when the present backward() ends."""

_CLEARING = (_TENSOR.zero_, _TENSOR.requires_grad_, _TENSOR.data.__get__, _TENSOR.grad_fn.__get__)
"""What loops that clear gradients by hand call."""


class GradientGuard:
    """Remembers each gradient as backward() left it, where it is that of one of several
    micro-batches: what is not linear in it (clipping) would give a result that depends on them, and
    what is read is not what the loop seems to say. ``whose``: what is said to the user about it.
    From backward() to the end of the micro-batch, parameters have another class. Packages other
    than torch get their ``grad`` as a tensor that can be cleared and refuses everything else.
    Parameters of an own class, as of sharded models, keep it. PyTorch does not count all changes of
    sharded gradients, so their norms are compared, on the device: :meth:`changed`.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], whose: str = OF_A_SHARD) -> None:
        self._whose = whose
        self._taken: dict[int, torch.Tensor] = {}
        self._class = _unreadable(f'{_READ}. {whose}: {_OFFER}', self._taken)
        #: Of each backward(): the parameters, and the identities and versions of their gradients.
        self._left: list[tuple[list[torch.Tensor], list[int], list[int]]] = []
        self._done: list[torch.Tensor] = []  # parameters of a backward() that has not ended
        self._norms: dict[int, tuple[torch.Tensor, int]] = {}
        self._changed: list[torch.Tensor] = []
        self._unreadable: list[torch.Tensor] = []
        self._on = False
        self._note, self._watched = self._noting(), set[int]()
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Watch these parameters too, but for frozen ones."""
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._watched:
                self._watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._note)

    def begin_micro_batch(self, of_several: bool) -> None:
        """Call before a micro-batch; ``of_several``: whether the global batch has other ones."""
        self._left.clear()
        self._done.clear()
        self._norms, self._on = {}, of_several
        self._class.of_several = of_several

    def check(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Call before gradients are taken; BadInput if one was changed after backward()."""
        if self._done:  # of a backward() that has failed
            self._after_backward()
        # In few calls of Python, as nearly always nothing has changed.
        for done, ids, versions in self._left:
            now: Any = list(map(grad_of, done))
            if list(map(id, now)) != ids or list(map(_version_of, now)) != versions:
                self._check_each(parameters)
                break
        if norms := self._norms:
            found = [(grad_of(p), *norms[id(p)]) for p in parameters if id(p) in norms]
            self._compare([(g, *where) for g, *where in found if g is not None])

    def _check_each(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        left = {id(p): (i, v) for both in self._left for p, i, v in zip(*both, strict=True)}
        for parameter in parameters:
            gradient, before = grad_of(parameter), left.get(id(parameter))
            if gradient is not None and before not in (None, (id(gradient), gradient._version)):
                self.refuse()

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """:meth:`check` gradients and take them, unseen by readers until the micro-batch ends."""
        self.check(parameters)
        gradients = list(map(grad_of, parameters))
        plain, own, taken = torch.nn.Parameter, self._class, self._taken
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            set_grad(parameter, None)
            if parameter.__class__ is own:
                taken[id(parameter)] = gradient
            elif parameter.__class__ is plain:
                taken[id(parameter)] = gradient
                parameter.__class__ = own
                self._unreadable.append(parameter)
        return gradients

    def _compare(self, divided: list[Any]) -> None:
        """Compare sharded gradients: each with the norms of its backward(), and its place there."""
        if not divided:
            return
        # Those of one backward pass are together: mostly all of them, in its order.
        divided.sort(key=lambda one: one[2])
        norms = divided[0][1]
        if len(norms) == len(divided) and all(one[1] is norms for one in divided):
            before = norms
        else:
            before = torch.stack([norms[i] for _, norms, i in divided])
        now = _norms_of([gradient for gradient, _, _ in divided])
        # Not by their values, as NaN does not equal itself.
        self._changed.append(before.view(torch.int64).ne(now.view(torch.int64)).any())

    def changed(self) -> torch.Tensor | None:
        """Whether a sharded gradient has changed since, as a number on the device, or None."""
        flags, self._changed = self._changed, []
        return torch.stack(flags).any() if flags else None

    def refuse(self) -> NoReturn:
        raise BadInput(f'{_CHANGED}. {self._whose}: {_OFFER}')

    def end_micro_batch(self) -> None:
        for parameter in self._unreadable:
            parameter.__class__ = torch.nn.Parameter
        self._unreadable.clear()
        self._taken.clear()

    def _noting(self) -> Callable[[torch.Tensor], None]:
        """The hook of all parameters, which runs often and so does next to nothing."""
        done, after = self._done, self._after_backward

        def note(parameter: torch.Tensor) -> None:
            if not done:
                _at_the_end(after)
            done.append(parameter)

        return note

    @torch.no_grad()
    def _after_backward(self) -> None:
        done = [parameter for parameter in self._done if grad_of(parameter) is not None]
        self._done.clear()
        gradients: Any = list(map(grad_of, done))
        self._left.append((done, list(map(id, gradients)), list(map(_version_of, gradients))))
        if not self._on:
            return
        plain, own, divided = torch.nn.Parameter, self._class, []
        for parameter in done:
            if parameter.__class__ is plain:
                parameter.__class__ = own
                self._unreadable.append(parameter)
            elif parameter.__class__ is not own and is_divided(parameter):
                divided.append(parameter)
        if divided:
            norms = _norms_of([grad for p in divided if (grad := grad_of(p)) is not None])
            self._norms.update((id(parameter), (norms, i)) for i, parameter in enumerate(divided))


def _norms_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm([local(g) for g in gradients], dtype=torch.float64))


def _unreadable(sentence: str, taken: dict[int, torch.Tensor]) -> Any:
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
        of_several = True

        @property
        def grad(self) -> torch.Tensor | None:
            found: torch.Tensor | None = grad_of(self)
            reader = sys._getframe(1).f_globals.get('__name__', '')
            if reader.partition('.')[0] in _NO_USERS:
                return found
            if found is None and id(self) in taken:
                found = taken[id(self)].clone()  # whatever is done to it, the sum stays
            if found is None or not self.of_several:
                return found
            return found.as_subclass(Unreadable)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            taken.pop(id(self), None)
            set_grad(self, value)

        @grad.deleter
        def grad(self) -> None:
            set_grad(self, None)

        def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
            copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    return UnreadableGrad
