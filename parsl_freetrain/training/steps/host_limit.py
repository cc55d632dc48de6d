"""Whether a device waits for Python, which launches its operations."""

import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UP, _LOOKED_AT = 20, 40  # micro-batches
_FACTOR = 1.5  # Python may take so much longer than the device
_SPARE, _MOST_S, _CYCLES = 1.5, 0.5, 2e9  # of Python's time; seconds; of a device in a second


class HostLimit:
    """Compares once how long Python and the device take for a micro-batch, and says if that is bad.

    A device that waits for Python does not show how long it works. So it is kept busy before one
    micro-batch, whose operations then wait for the device and follow one another at once. Later
    micro-batches ask for the result, and do not wait for it.
    """

    def __init__(
        self,
        shards: int,
        *,
        on: bool,
        device: Any = torch.cuda,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._shards, self._device, self._clock = shards, device, clock
        self._on, self._number, self._began = on, 0, 0.0
        self._took: list[float] = []
        self._events: list[Any] = []

    def begin(self) -> None:
        if not self._on:
            return
        self._number += 1
        self._began = self._clock()
        if self._number == _LOOKED_AT:
            self._events = [self._device.Event(enable_timing=True) for _ in range(2)]
            self._device._sleep(int(_CYCLES * min(_SPARE * min(self._took), _MOST_S)))
            self._events[0].record()

    def end(self, passes: int, samples: int) -> None:
        """Call after it; ``passes``: of this rank in a step, of up to so many ``samples`` each."""
        if not self._on:
            return
        if _WARM_UP < self._number < _LOOKED_AT:
            self._took.append(self._clock() - self._began)
        elif self._number == _LOOKED_AT:
            self._events[1].record()
        elif self._number > _LOOKED_AT and self._events[1].query():
            self._on = False
            python_s = min(self._took)
            device_s = self._events[0].elapsed_time(self._events[1]) / 1e3
            if python_s > _FACTOR * device_s:
                enough = self._shards * _FACTOR * device_s / python_s
                # A power of two, but a rank needs a shard.
                fewer = max(1 << int(max(enough, 1)).bit_length() - 1, -(-self._shards // passes))
                mode = f'mode=Reproducible(shards={fewer}), ' if passes > 1 else ''
                print(
                    f'The device waits for Python: a pass of {samples} samples, forward and back, '
                    f'takes Python {1e3 * python_s:.3g} ms and the device {1e3 * device_s:.3g} ms. '
                    f'What helps: {mode}torch.compile(model) or larger batches.'
                )
