"""Noticing that a device waits for Python."""

from __future__ import annotations

from collections.abc import Callable

_SKIPPED, _LOOKED_AT, _LEAST_SHARE = 10, 20, 0.03


class HostLimit:
    """Tells from Python's waits in a step whether the device was fast enough."""

    def __init__(self, shards: int, say: Callable[[str], None] = print) -> None:
        self._shards, self._say = shards, say
        self._steps, self._step_s, self._waited_s = -_SKIPPED, 0.0, 0.0

    def step_took(self, seconds: float, waited_s: float, passes: int, samples: int) -> None:
        """Record a step, in which Python waited so long, of so many passes and samples in each."""
        self._steps += 1
        if not 0 < self._steps <= _LOOKED_AT:
            return
        self._step_s += seconds
        self._waited_s += waited_s
        if self._steps < _LOOKED_AT or self._waited_s > _LEAST_SHARE * self._step_s:
            return
        fewer = max(1, self._shards // 2)
        larger = f'mode=Reproducible(shards={fewer}) makes larger passes, ' if passes > 1 else ''
        self._say(
            f'The device waits for Python, which launches its operations: a step of '
            f'{1e3 * self._step_s / _LOOKED_AT:.0f} ms has {passes} forward and backward passes of '
            f'{samples} samples, and whenever one was over the device had nothing left to do: '
            f'{larger}torch.compile(model) makes fewer operations.'
        )
