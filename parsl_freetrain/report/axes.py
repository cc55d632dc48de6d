"""Axes of charts: positions of values between 0 and 1, and ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

MOST_TICKS = 5
LARGEST = 1e300
"""Of larger values, the difference may be infinite."""
_SECONDS = (
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    14400,
    21600,
    43200,
    86400,
)


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, with its ticks and their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high end, clipped to these."""
        low, high, value = (
            (math.log(max(v, self.low)) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low)))


def drawable(value: float) -> bool:
    """Whether a chart can show a value: it is a number, and not beyond all measure."""
    return abs(value) <= LARGEST


def linear(
    low: float, high: float, name: Callable[[float], str] | None = None, whole: bool = False
) -> Scale:
    """An axis with ticks at round values; ``whole``: at whole numbers only."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / MOST_TICKS)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(
        low, high, tuple((k * step, (name or number)(k * step)) for k in range(first, last + 1))
    )


def seconds(high: float) -> Scale:
    """An axis of durations from 0."""
    high = high if high > 0 else 1.0
    days = 86400 * math.ceil(high / MOST_TICKS / 86400)
    step = (
        next((s for s in _SECONDS if high / s <= MOST_TICKS), days)
        if high > MOST_TICKS
        else _round_step(high / MOST_TICKS)
    )
    return Scale(
        0.0,
        high,
        tuple((k * step, duration(k * step)) for k in range(math.floor(high / step + 1e-9) + 1)),
    )


def logarithmic(low: float, high: float) -> Scale:
    """An axis with ticks at powers of ten, and between them if there is room; both ends above 0."""
    if not high > low:
        low, high = low / 2, high * 2
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits, every in (
        ((1, 2, 5), 1),
        ((1, 3), 1),
        *(((1,), k) for k in range(1, last - first + 1)),
    ):
        named = [
            d * 10.0**k
            for k in range(first, last + 1, every)
            for d in digits
            if low <= d * 10.0**k <= high
        ]
        if len(named) <= MOST_TICKS:
            break
    return Scale(
        low, high, tuple((value, number(value)) for value in named or [low, high]), log=True
    )


def number(value: float) -> str:
    """A short number: 1200000 as 1.2M."""
    for size, unit in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= size:
            return f'{value / size:.3g}{unit}'
    return f'{value:.3g}'


def duration(value: float) -> str:
    """A duration as days and clock time; below a minute as seconds."""
    if value < 60:
        return f'{value:.3g} s'
    whole = round(value)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    clock = (
        f'{hours}:{rest // 60:02d}:{rest % 60:02d}'
        if hours or days
        else f'{rest // 60}:{rest % 60:02d}'
    )
    return f'{days} d {clock}' if days else clock


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
