"""Axes of charts: positions of values between 0 and 1, and ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar('P')
MOST_TICKS = 5
LARGEST = 1e300  # of larger values, the difference may be infinite
_STEPS = (1, 2, 5, 10, 15, 30)
_SECONDS = *_STEPS, *(60 * s for s in _STEPS), *(3600 * s for s in (1, 2, 4, 6, 12, 24))


@dataclass(frozen=True)
class Scale:
    """An axis from ``low`` to ``high``, with its ticks and their labels."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def part(self, value: float) -> float:
        """Position of a value: 0 at the low end, 1 at the high end, clipped to these."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = (math.log(max(v, self.low)) for v in (low, high, value))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def drawable(value: float) -> bool:
    return abs(value) <= LARGEST


def extremes(points: Sequence[P], every: int, height: Callable[[P], float]) -> tuple[P, ...]:
    """The first point, the last, and the extremes of each ``every``; all if that is 2 or less."""
    if every <= 2:
        return tuple(points)
    chosen, heights = {0, len(points) - 1}, [height(point) for point in points]
    for start in range(0, len(points), every):
        part = range(start, min(start + every, len(points)))
        chosen |= {min(part, key=heights.__getitem__), max(part, key=heights.__getitem__)}
    return tuple(points[i] for i in sorted(chosen))


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
    marks = tuple(k * step for k in range(first, last + 1))
    return Scale(low, high, tuple((mark, (name or number)(mark)) for mark in marks))


def seconds(high: float) -> Scale:
    high = high if high > 0 else 1.0
    days = 86400 * math.ceil(high / MOST_TICKS / 86400)
    step = _round_step(high / MOST_TICKS)
    if high > MOST_TICKS:
        step = next((s for s in _SECONDS if high / s <= MOST_TICKS), days)
    ticks = [k * step for k in range(math.floor(high / step + 1e-9) + 1)]
    return Scale(0.0, high, tuple((tick, duration(tick)) for tick in ticks))


def logarithmic(low: float, high: float) -> Scale:
    """An axis with ticks at powers of ten, and between them if there is room; both ends above 0."""
    if not high > low:
        low, high = low / 2, high * 2
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    rarer = (((1,), k) for k in range(1, last - first + 1))
    for digits, every in (((1, 2, 5), 1), ((1, 3), 1), *rarer):
        round_ones = [d * 10.0**k for k in range(first, last + 1, every) for d in digits]
        named = [value for value in round_ones if low <= value <= high]
        if len(named) <= MOST_TICKS:
            break
    ticks = tuple((value, number(value)) for value in named or [low, high])
    return Scale(low, high, ticks, log=True)


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
    minutes = f'{rest // 60:02d}' if hours or days else str(rest // 60)
    clock = f'{hours}:{minutes}:{rest % 60:02d}' if hours or days else f'{minutes}:{rest % 60:02d}'
    return f'{days} d {clock}' if days else clock


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
