"""Finding losses and gradients that are infinite or 'not a number', before they do harm."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

import torch
from torch.nn.utils import get_total_norm

from parsl_freetrain.training.checkpoint.local_shard import local, real
from parsl_freetrain.training.checkpoint.trainables import Prepared, parameters_of

LOOK_EVERY_S = 0.25
_REMEMBERED = 4096  # more than the number of steps between two checks of a Watch
NEVER = 2**62


def all_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    found = [
        real(t._values() if t.layout is torch.sparse_coo else local(t))
        for t in tensors
        if t is not None and (t.is_floating_point() or t.is_complex())
    ]
    if not found or math.isfinite(float(get_total_norm(found))):
        return True
    # The norm may overflow even if every number is finite.
    return all(bool(torch.isfinite(tensor).all()) for tensor in found)


class Watch:
    """Looks a few times a second whether parameters and buffers, once finite, still are."""

    def __init__(self, prepared: Prepared, clock: Callable[[], float] = monotonic) -> None:
        tensors = [t.detach() for t in prepared.tensors() if t.layout is torch.strided]
        self._tensors = [tensor for tensor in tensors if all_finite([tensor])]
        found = [real(local(tensor)) for tensor in self._tensors]
        self._floating = [tensor for tensor in found if tensor.is_floating_point()]
        self._clock = clock
        self._looked_at = -math.inf
        self._answer: tuple[Callable[[], bool], Callable[[], float]] | None = None
        self._asked_at = 0

    def spoilt(self) -> bool:
        self._looked_at = self._clock()
        return not all_finite(self._tensors)

    def look(self, samples: int) -> tuple[int, bool] | None:
        """Look without waiting for a device: ask at most every :data:`LOOK_EVERY_S` seconds, answer
        in a later call: the ``samples`` of the call that asked, and whether a number was not
        finite.
        """
        if self._answer is None:
            if self._clock() - self._looked_at < LOOK_EVERY_S:
                return None
            self._looked_at, self._asked_at = self._clock(), samples
            found = self._floating
            self._answer = to_host(get_total_norm(found) if found else torch.zeros(()))
        here, norm = self._answer
        if not here():
            return None
        self._answer = None
        return self._asked_at, not math.isfinite(norm()) and self.spoilt()


def to_host(number: torch.Tensor) -> tuple[Callable[[], bool], Callable[[], float]]:
    """Functions: whether a number of a device is here, and one that waits for it and returns it."""
    if number.device.type == 'cpu':
        return lambda: True, lambda: float(number)
    here = torch.empty((), dtype=number.dtype, device='cpu', pin_memory=True)
    here.copy_(number, non_blocking=True)
    copied = torch.get_device_module(number.device).Event()
    copied.record()
    return copied.query, lambda: (copied.synchronize(), float(here))[1]


class FirstNonFinite:
    """Remembers the step in which this rank's own gradient was first not finite, which the sum over
    all ranks does not show. Of the last :data:`_REMEMBERED` steps it keeps the sum of the smallest
    gradient of each model, on the device: nearly always every gradient shows a bad loss.
    """

    def __init__(self, models: Iterable[torch.nn.Module], device: torch.device) -> None:
        self._device = device
        self._step = 0
        self._sums: deque[tuple[int, torch.Tensor]] = deque(maxlen=_REMEMBERED)
        for model in models:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if trained:
                min(trained, key=lambda parameter: parameter.numel()).register_hook(self.note)

    def next_step(self) -> None:
        self._step += 1

    def first(self) -> torch.Tensor:
        """The number of the step, from 1; :data:`NEVER` if there was none."""
        bad = (step for step, total in self._sums if not math.isfinite(float(total)))
        return torch.full((1,), min(bad, default=NEVER), dtype=torch.int64, device=self._device)

    def forget(self) -> None:
        self._sums.clear()

    def note(self, gradient: torch.Tensor) -> None:
        gradient = gradient.detach()
        values = gradient._values() if gradient.layout is torch.sparse_coo else gradient
        self._sums.append((self._step, real(values).sum(dtype=torch.float32)))


class Guard:
    """Keeps optimizers from stepping with non-finite gradients; ``bad``: one was skipped."""

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        anywhere: Callable[[bool], bool] = lambda bad: bad,
    ) -> None:
        self.on = False
        self.bad = False
        self._anywhere = anywhere
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # With a gradient scaler, fused optimizers skip what it has found, which is no fault.
        scaled = getattr(optimizer, 'found_inf', None) is not None
        parameters = parameters_of(optimizer) if self.on and not scaled else []
        if parameters and self._anywhere(not all_finite(p.grad for p in parameters)):
            self.bad = True
            for parameter in parameters:
                parameter.grad = None  # the step does nothing then
