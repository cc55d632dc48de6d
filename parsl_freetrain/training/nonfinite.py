"""Finding numbers that are not finite, a loss or a gradient that became infinite or 'not a number', before they do harm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

import torch
from torch.nn.utils import get_total_norm

from parsl_freetrain.training.prepared import Prepared

LOOK_EVERY_S = 0.25
_REMEMBERED = 4096   # more than there are between two looks of a Watch
NEVER = 2 ** 62


def all_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether no element of these is infinite or not a number; waits for the device. None and integers count as finite."""
    found = [t._values() if t.layout is torch.sparse_coo else t for t in tensors if t is not None and t.is_floating_point()]
    if not found or math.isfinite(float(get_total_norm(found))):
        return True
    # The norm of large numbers may overflow though each of them is finite.
    return all(bool(torch.isfinite(tensor).all()) for tensor in found)


class Watch:
    """Looks now and then whether what is trained is still finite.

    A gradient that is not finite makes parameters that are not, and these stay so; to look at them a few times a second finds the same as
    to look at every gradient, for less. What has infinities by intention (masks) is left out.
    """

    def __init__(self, prepared: Prepared, clock: Callable[[], float] = monotonic) -> None:
        self._tensors = [tensor.detach() for tensor in prepared.tensors() if all_finite([tensor.detach()])]
        self._clock = clock
        self._looked_at = -math.inf

    def spoilt(self) -> bool:
        """Whether something has become infinite or not a number."""
        self._looked_at = self._clock()
        return not all_finite(self._tensors)

    def due(self) -> bool:
        """Whether the last look was at least :data:`LOOK_EVERY_S` seconds ago."""
        return self._clock() - self._looked_at >= LOOK_EVERY_S


class Blame:
    """Remembers in which step this rank's own gradient was first not finite, before the sum over all ranks, in which that is lost.

    It keeps the sum of one tensor of each model, the smallest, for each of the last :data:`_REMEMBERED` steps, on its device and without
    waiting for it: what makes a loss infinite or not a number nearly always shows in each gradient. The sums are looked at when somebody
    asks, which is when something is not finite.
    """

    def __init__(self, models: Iterable[torch.nn.Module], device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._sums: deque[tuple[int, torch.Tensor]] = deque(maxlen=_REMEMBERED)
        for model in models:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if trained:
                min(trained, key=lambda parameter: parameter.numel()).register_hook(self._note)

    def next_step(self) -> None:
        """A step begins."""
        self._step += 1

    def first(self) -> torch.Tensor:
        """The step, from 1, as one number; :data:`NEVER` where there was none."""
        bad = (step for step, total in self._sums if not math.isfinite(float(total)))
        return torch.full((1,), min(bad, default=NEVER), dtype=torch.int64, device=self._device)

    def forget(self) -> None:
        """What was not finite has been dealt with."""
        self._sums.clear()

    def _note(self, gradient: torch.Tensor) -> None:
        gradient = gradient.detach()
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        self._sums.append((self._step, (torch.view_as_real(values) if values.is_complex() else values).sum(dtype=torch.float32)))


class Guard:
    """Keeps optimizers from stepping with a gradient that is not finite.

    Attributes
    ----------
    on
        Whether it looks at all; each look reads every gradient once, and waits for the device.
    bad
        Whether a step was kept back since it was last set to False.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.on = False
        self.bad = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self.on and drop_bad_gradients(optimizer):
            self.bad = True


def drop_bad_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Take an optimizer's gradients away, so that its step does nothing, if one of them is not finite; whether it was so."""
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    if all_finite(p.grad for p in parameters):
        return False
    for parameter in parameters:
        parameter.grad = None
    return True
