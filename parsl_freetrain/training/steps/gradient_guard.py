"""Notices when the user's loop reads or changes gradients of which it has only a part."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from parsl_freetrain.core.model.errors import BadInput

OF_A_SHARD = 'In reproducible mode it is the gradient of a virtual shard there'

_CHANGED = 'A gradient was changed between backward() and optimizer.step(), as clip_grad_norm_ does'
_READ = 'The body of ctx.loop read the gradient of a parameter after backward()'
_OFFER = (
    'say ctx.prepare(..., clip_grad_norm=...) to clip the gradient of the global batch, and read '
    'it or change it in any other way in ctx.before_step(fn).'
)
_NO_USERS = ('torch', 'parsl_freetrain')
"""Packages that may read gradients: optimizers clear them, and changes are noticed."""


class GradientGuard:
    """Remembers each gradient as backward() left it, where the gradient in the loop is that of one
    of several turns. What is not linear in it (clipping) would give a result that depends on the
    turns, and what is read is not what the loop seems to say.

    From backward() to the end of the turn, parameters have another class, whose ``grad`` refuses
    to be read by other packages than torch. Parameters of an own class, such as those of sharded
    models, keep it.

    Parameters
    ----------
    whose
        What is said to the user about the gradient.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], whose: str = OF_A_SHARD) -> None:
        self._whose = whose
        self._class = _unreadable(f'{_READ}. {whose}: {_OFFER}')
        self._left: dict[int, tuple[int, int]] = {}
        self._unreadable: list[torch.Tensor] = []
        self._on = False
        for parameter in parameters:
            if parameter.requires_grad:  # one that is unfrozen later is not watched
                parameter.register_post_accumulate_grad_hook(self._note)

    def begin_turn(self, of_several: bool) -> None:
        """Call before a turn; ``of_several``: whether the global batch has other ones."""
        self._left, self._on = {}, of_several

    def check(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Call before the gradients of a turn are taken.

        Raises
        ------
        BadInput
            If one was changed after backward().
        """
        for parameter in parameters:
            left = self._left.get(id(parameter))
            if left is not None and parameter.grad is not None and left != _mark(parameter.grad):
                raise BadInput(f'{_CHANGED}. {self._whose}: {_OFFER}')

    def end_turn(self) -> None:
        """Call after a turn."""
        for parameter in self._unreadable:
            parameter.__class__ = torch.nn.Parameter
        self._unreadable = []

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._left[id(parameter)] = _mark(parameter.grad)
        if self._on and type(parameter) is torch.nn.Parameter:
            parameter.__class__ = self._class
            self._unreadable.append(parameter)


def _unreadable(sentence: str) -> type[torch.nn.Parameter]:
    plain: Any = torch.Tensor.grad

    class Unreadable(torch.nn.Parameter):
        @property
        def grad(self) -> torch.Tensor | None:
            reader = sys._getframe(1).f_globals.get('__name__', '')
            if reader.partition('.')[0] not in _NO_USERS:
                raise BadInput(sentence)
            return plain.__get__(self)  # type: ignore[no-any-return]

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            plain.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            plain.__delete__(self)

    return Unreadable


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), gradient._version
