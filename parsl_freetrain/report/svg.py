"""Inline SVG that fits any width, coloured by the style sheet; style attributes are forbidden."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from markupsafe import Markup

Point = tuple[float, float]

SIDE = 1000


class Chart:
    """One chart, in layers; ``label``: for screen readers, ``size``: a style sheet's class."""

    def __init__(self, x: 'Scale', y: 'Scale | None', label: str, size: str = 'middle') -> None:
        self._x, self._y, self._label, self._size = x, y, label, size
        self._stretched: list[str] = []
        # By position, so that a month of preemptions does not fill a disk.
        self._marks: dict[tuple[str, ...], str] = {}
        self._behind: dict[tuple[str, ...], str] = {}
        self._names: list[str] = []

    def line(self, points: Iterable[Point], kind: str, name: str = '') -> None:
        """Draw a line through points; ``kind``: a class of the style sheet, ``name``: tooltip."""
        drawn = ' '.join(
            f'{SIDE * self._x.part(x):.1f},{SIDE * (1 - self._up(y)):.1f}' for x, y in points
        )
        self._stretched.append(
            f'<polyline class="line {kind}" points="{drawn}">{_title(name)}</polyline>'
        )

    def steps(
        self,
        grid: Sequence[float],
        floor: Sequence[float],
        ceiling: Sequence[float],
        kind: str,
        name: str = '',
    ) -> None:
        """Draw an area between two functions that are constant between grid points."""
        above, below = _staircase(grid, ceiling), _staircase(grid, floor)
        around = [*above, *reversed(below)]
        places = ((SIDE * self._x.part(x), SIDE * (1 - self._up(y))) for x, y in around)
        path = ' '.join(f'{x:.1f},{y:.1f}' for x, y in places)
        self._stretched.append(
            f'<polygon class="area {kind}" points="{path}">{_title(name)}</polygon>'
        )

    def boxes(
        self, boxes: Iterable[tuple[float, float, float, float]], kind: str, name: str = ''
    ) -> None:
        """Draw boxes: start and end on the x axis, top and bottom as parts of the height."""
        path = ''.join(
            f'M{SIDE * self._x.part(a):.1f} {SIDE * top:.1f}H{SIDE * self._x.part(b):.1f}'
            f'V{SIDE * bottom:.1f}H{SIDE * self._x.part(a):.1f}Z'
            for a, b, top, bottom in boxes
        )
        if path:
            self._stretched.append(f'<path class="area {kind}" d="{path}">{_title(name)}</path>')

    def dot(self, point: Point, kind: str, name: str = '') -> None:
        x, y = _percent(self._x.part(point[0])), _percent(1 - self._up(point[1]))
        self._marks.setdefault(
            ('dot', kind, x, y),
            f'<circle class="dot {kind}" cx="{x}" cy="{y}" r="3.5">{_title(name)}</circle>',
        )

    def cross(self, x: float, up: float, name: str = '') -> None:
        at, height = _percent(self._x.part(x)), _percent(1 - up)
        self._marks.setdefault(
            ('cross', at, height),
            f'<text class="cross" x="{at}" y="{height}" dy="4">×{_title(name)}</text>',
        )

    def upright(self, x: float, kind: str, name: str = '', *, behind: bool = False) -> None:
        """Draw a vertical line over the whole height; ``behind``: below lines and areas."""
        at = _percent(self._x.part(x))
        drawn = (
            f'<line class="upright {kind}" x1="{at}" x2="{at}" y1="0" '
            f'y2="100%">{_title(name)}</line>'
        )
        (self._behind if behind else self._marks).setdefault(('upright', kind, at), drawn)

    def row(self, middle: float, name: str) -> None:
        """Add a row's name beside the chart; ``middle`` is a part of the height from the top."""
        self._names.append(
            f'<text class="tick y" x="-8" y="{_percent(middle)}" dy="4">{escape(name)}</text>'
        )

    def svg(self) -> Markup:
        grid = []
        for value, name in self._y.ticks if self._y else ():
            at = _percent(1 - self._up(value))
            grid.append(
                f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/><text class="tick y" '
                f'x="-8" y="{at}" dy="4">{escape(name)}</text>'
            )
        for value, name in self._x.ticks:
            part = self._x.part(value)
            anchor = ' end' if part > 0.93 else ' start' if part < 0.04 else ''
            grid.append(
                f'<line class="grid" x1="{_percent(part)}" x2="{_percent(part)}" y1="100%" '
                f'y2="100%"/><text class="tick x{anchor}" x="{_percent(part)}" y="100%" '
                f'dy="16">{escape(name)}</text>'
            )
        return Markup(  # noqa: S704 - names are escaped where they are put in
            f'<svg class="plot {self._size}" role="img" aria-label="{escape(self._label)}">'
            f'{"".join([*grid, *self._behind.values()])}'
            f'<svg width="100%" height="100%" viewBox="0 0 {SIDE} {SIDE}" '
            'preserveAspectRatio="none">'
            f'{"".join(self._stretched)}</svg>{"".join(self._marks.values())}{"".join(self._names)}</svg>'
        )

    def _up(self, value: float) -> float:
        return self._y.part(value) if self._y else value


def _staircase(grid: Sequence[float], heights: Sequence[float]) -> list[Point]:
    points: list[Point] = []
    for i, (x, y) in enumerate(zip(grid, heights, strict=True)):
        if i and heights[i - 1] != y:
            points.append((x, heights[i - 1]))
        if not i or i == len(grid) - 1 or heights[i - 1] != y:
            points.append((x, y))
    return points


def _percent(part: float) -> str:
    return f'{100 * part:.1f}%'


def _title(name: str) -> str:
    return f'<title>{escape(name)}</title>' if name else ''


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


def linear(low: float, high: float, whole: bool = False) -> Scale:
    """An axis with ticks at round values; ``whole``: at whole numbers only."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / MOST_TICKS)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    marks = tuple(k * step for k in range(first, last + 1))
    return Scale(low, high, tuple((mark, number(mark)) for mark in marks))


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
    for size, unit in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= size:
            return f'{value / size:.3g}{unit}'
    return f'{value:.3g}'


def duration(value: float) -> str:
    """A duration as days and clock time; below a minute as seconds."""
    if value < 60:
        return f'{value:.3g} s'
    days, rest = divmod(round(value), 86400)
    hours, rest = divmod(rest, 3600)
    minutes = f'{rest // 60:02d}' if hours or days else str(rest // 60)
    clock = f'{hours}:{minutes}:{rest % 60:02d}' if hours or days else f'{minutes}:{rest % 60:02d}'
    return f'{days} d {clock}' if days else clock


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
