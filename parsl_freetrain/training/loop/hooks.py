"""What the user wants done once per global batch or epoch, on all ranks, around the real step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parsl_freetrain.core.model.errors import BadInput

Hook = Callable[[], object]


@dataclass
class Hooks:
    """The functions that the user has registered, in order; ``after_epoch``: what else is done at
    the end of an epoch, after the user's. ``running``: whether one of them runs. ``by_epochs``:
    whether the function has a loop over ``ctx.epochs()``.
    """

    before_step: list[Hook] = field(default_factory=list)
    after_step: list[Hook] = field(default_factory=list)
    each_epoch: list[Hook] = field(default_factory=list)
    after_epoch: list[Hook] = field(default_factory=list)
    running: bool = False
    by_epochs: bool = False

    @property
    def at_epochs(self) -> bool:
        """Whether anything is done at the end of an epoch."""
        return bool(self.each_epoch or self.after_epoch or self.by_epochs)

    def run(self, hooks: list[Hook]) -> None:
        """Call functions in order."""
        self.running = True
        try:
            for hook in hooks:
                hook()
        finally:
            self.running = False


class MovingAverage:
    """The exponential moving average of a model, updated after each step::

        average = decay * average + (1 - decay) * parameter

    Buffers are copied. The average begins with the model's parameters.

    Attributes
    ----------
    model
        A copy of the model that holds the average; it is never trained.

    Raises
    ------
    BadInput
        If the decay is not from 0 to 1, or the model cannot be copied.
    """

    def __init__(self, source: torch.nn.Module, decay: float) -> None:
        if not 0 <= decay <= 1:
            raise BadInput(f'ctx.ema was given the decay {decay}; it must be from 0 to 1.')
        self._source = source
        self._decay = decay
        try:
            self.model = copy.deepcopy(source)
        except (RuntimeError, TypeError) as error:
            raise BadInput(
                f'ctx.ema cannot copy the model, a {type(source).__name__} ({error}).'
            ) from error
        self.model.requires_grad_(False).eval()

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model's present parameters."""
        for mine, its in zip(self.model.parameters(), self._source.parameters(), strict=True):
            if mine.is_floating_point() or mine.is_complex():
                mine.lerp_(its.detach().to(mine.dtype), 1 - self._decay)
            else:
                mine.copy_(its)
        for kept, buffer in zip(self.model.buffers(), self._source.buffers(), strict=True):
            kept.copy_(buffer)
