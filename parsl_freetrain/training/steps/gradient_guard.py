"""Notices when the user's loop changes gradients of which it has only a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from parsl_freetrain.core.model.errors import BadInput

_OF_A_SHARD = (
    'A gradient was changed between backward() and optimizer.step(), as clip_grad_norm_ does. In '
    'reproducible mode it is the gradient of a virtual shard there: say ctx.prepare(..., '
    'clip_grad_norm=...) to clip the gradient of the global batch, and change it in any other way '
    'in ctx.before_step(fn).'
)


class GradientGuard:
    """Remembers each gradient as backward() left it, for reproducible mode, in which the gradient
    in the loop is that of one virtual shard. What is not linear in it (clipping) would give a
    result that depends on the shards. With micro-batches it is that of one of them.

    ``sentence`` is what is said to the user then.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], sentence: str = _OF_A_SHARD
    ) -> None:
        self._sentence = sentence
        self._left: dict[int, tuple[int, int]] = {}
        for parameter in parameters:
            if parameter.requires_grad:  # one that is unfrozen later is not watched
                parameter.register_post_accumulate_grad_hook(self._note)

    def begin_turn(self) -> None:
        """Call before a turn."""
        self._left = {}

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
                raise BadInput(self._sentence)

    def _note(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._left[id(parameter)] = _mark(parameter.grad)


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    return id(gradient), gradient._version
