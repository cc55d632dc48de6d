"""Notices when the user's loop reads or changes gradients of which it has only a part."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

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
_CLEARING = (_TENSOR.zero_, _TENSOR.requires_grad_, _TENSOR.data.__get__, _TENSOR.grad_fn.__get__)
"""What loops that clear gradients by hand call."""


class GradientGuard:
    """Remembers each gradient as backward() left it, where the gradient in the loop is that of one
    of several micro-batches. What is not linear in it (clipping) would give a result that depends
    on the micro-batches, and what is read is not what the loop seems to say.

    From backward() to the end of the micro-batch, parameters have another class. Packages other
    than torch get their ``grad`` as a tensor that can be cleared and refuses everything else.
    Parameters of an own class, such as those of sharded models, keep it. PyTorch does not count all
    changes of sharded gradients, so their sums are compared too. ``whose``: what is said to the
    user about the gradient.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], whose: str = OF_A_SHARD) -> None:
        self._whose = whose
        self._class = _unreadable(f'{_READ}. {whose}: {_OFFER}')
        self._left: dict[int, tuple[int, int]] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._unreadable: list[torch.Tensor] = []
        self._on = False
        for parameter in parameters:
            if parameter.requires_grad:  # one that is unfrozen later is not watched
                parameter.register_post_accumulate_grad_hook(self._note)

    def begin_micro_batch(self, of_several: bool) -> None:
        """Call before a micro-batch; ``of_several``: whether the global batch has other ones."""
        self._left, self._sums, self._on = {}, {}, of_several

    def check(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Call before the gradients of a micro-batch are taken. Raises BadInput if one was changed
        after backward().
        """
        sums = []
        for parameter in parameters:
            left, gradient = self._left.get(id(parameter)), parameter.grad
            if left is None or gradient is None:
                continue
            if left != _mark(gradient):
                raise BadInput(f'{_CHANGED}. {self._whose}: {_OFFER}')
            if id(parameter) in self._sums:
                sums.append(torch.stack([self._sums[id(parameter)], _sum(gradient)]))
        if sums:
            before, now = torch.stack(sums).unbind(1)
            if not torch.allclose(before, now, rtol=0, atol=0, equal_nan=True):
                raise BadInput(f'{_CHANGED}. {self._whose}: {_OFFER}')

    def end_micro_batch(self) -> None:
        """Call after a micro-batch."""
        for parameter in self._unreadable:
            parameter.__class__ = torch.nn.Parameter
        self._unreadable = []

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._left[id(parameter)] = _mark(parameter.grad)
        if self._on and is_divided(parameter.grad):
            self._sums[id(parameter)] = _sum(parameter.grad)
        if self._on and type(parameter) is torch.nn.Parameter:
            parameter.__class__ = self._class
            self._unreadable.append(parameter)


def _unreadable(sentence: str) -> type[torch.nn.Parameter]:
    plain = _TENSOR.grad

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
        @property
        def grad(self) -> torch.Tensor | None:
            found: torch.Tensor | None = plain.__get__(self)
            reader = sys._getframe(1).f_globals.get('__name__', '')
            if found is None or reader.partition('.')[0] in _NO_USERS:
                return found
            return found.as_subclass(Unreadable)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            plain.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            plain.__delete__(self)

        def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
            copied = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            return memo.setdefault(id(self), copied)  # type: ignore[no-any-return]

    return UnreadableGrad


def _sum(gradient: torch.Tensor) -> torch.Tensor:
    return local(gradient).sum(dtype=torch.float64)


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), gradient._version
