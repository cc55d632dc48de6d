"""Where the parts of a divided axis begin and end, and what a layer needs of the neighbouring
parts. An axis of ``n`` positions in ``p`` parts has ``p + 1`` bounds, from 0 to ``n``; an output
position belongs to the part with the input position in the middle of its window, so parts need not
be equal or divisible by the stride, and the halo is as narrow as possible.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from parsl_freetrain.core.model.errors import BadInput

AXES = ('depth', 'height', 'width')

Bounds = tuple[int, ...]
Range = tuple[int, int]


def split(extent: int, parts: int, axis: str) -> Bounds:
    """Bounds of parts that differ by one position at most, larger ones first; or BadInput."""
    if parts > extent:
        raise BadInput(
            f'The {axis} of {extent} cannot be divided into {parts} parts: it can into '
            f'up to {extent}.'
        )
    each, left = divmod(extent, parts)
    return tuple(part * each + min(part, left) for part in range(parts + 1))


@dataclass(frozen=True)
class Window:
    """A window that moves over the input, as in convolution and pooling, in torch's numbers."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    def extent(self, n: int) -> int:
        return (n + 2 * self.padding - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def place(self, position: int) -> int:
        """The first output position after a border at ``position``, even outside."""
        middle = self.dilation * (self.kernel - 1) // 2 - self.padding
        return -((middle - position) // self.stride)

    def need(self, low: int, high: int) -> Range:
        """The inputs that the outputs from ``low`` to before ``high`` need; even outside."""
        return low * self.stride - self.padding, (
            high - 1
        ) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class TransposedWindow(Window):
    """A window into which each input position is spread, as in torch's transposed convolution."""

    output_padding: int = 0

    def extent(self, n: int) -> int:
        """As :meth:`Window.extent`; the other methods correspond too."""
        spread = self.dilation * (self.kernel - 1) + self.output_padding + 1
        return (n - 1) * self.stride - 2 * self.padding + spread

    def place(self, position: int) -> int:
        return position * self.stride

    def need(self, low: int, high: int) -> Range:
        return -((self.dilation * (self.kernel - 1) - self.padding - low) // self.stride), (
            high - 1 + self.padding
        ) // self.stride + 1


@dataclass(frozen=True)
class Move:
    """What one part needs along an axis, and what its neighbours, before and after it, need."""

    keep: Range  # of its own positions, what it needs
    send: tuple[Range, Range]  # of its own positions, what the neighbours need
    receive: Range  # numbers of positions that come from the neighbours
    pad: Range  # numbers of positions before the beginning and after the end of the axis


@lru_cache(maxsize=4096)
def placed(reach: Window, bounds: Bounds, axis: str) -> Bounds:
    """Bounds of a layer's output, from its input's; BadInput if a part would be empty."""
    extent = reach.extent(bounds[-1])
    found = (0, *[min(max(reach.place(position), 0), extent) for position in bounds[1:-1]], extent)
    if any(end <= begin for begin, end in pairwise(found)):
        raise BadInput(
            f'{_said(reach)} makes {max(extent, 0)} positions of a {axis} of {bounds[-1]} in '
            f'{_parts(bounds)}, which leaves a part without any: {_would_do(reach, bounds)}.'
        )
    return found


@lru_cache(maxsize=4096)
def moves(reach: Window, bounds: Bounds, out: Bounds, axis: str) -> tuple[Move, ...]:
    """What every part needs of others; BadInput, on all ranks, if its neighbours have less."""
    needs = [reach.need(*part) for part in pairwise(out)]
    return tuple(_move(reach, bounds, needs, part, axis) for part in range(len(needs)))


def _move(reach: Window, bounds: Bounds, needs: Sequence[Range], part: int, axis: str) -> Move:
    begin, end, extent = bounds[part], bounds[part + 1], bounds[-1]
    low, high = needs[part]
    first, last = min(max(low, 0), extent), max(min(high, extent), 0)
    if first < bounds[max(part - 1, 0)] or last > bounds[min(part + 2, len(bounds) - 1)]:
        raise BadInput(
            f'{_said(reach)} needs {max(begin - first, last - end)} positions beyond '
            f'part {part} of a {axis} of {extent} in '
            f'{_parts(bounds)}, more than the neighbouring part has: {_would_do(reach, bounds)}.'
        )

    def common(one: Range, other: Range) -> Range:
        low, high = max(one[0], other[0]), min(one[1], other[1])
        return (low - begin, high - begin) if low < high else (0, 0)

    own = begin, end
    return Move(
        keep=common(own, (low, high)),
        send=(
            common(own, needs[part - 1]) if part > 0 else (0, 0),
            common(own, needs[part + 1]) if part + 1 < len(needs) else (0, 0),
        ),
        receive=(max(min(begin, last) - first, 0), max(last - max(end, first), 0)),
        pad=(min(max(-low, 0), high - low), min(max(high - extent, 0), high - low)),
    )


def _would_do(reach: Window, bounds: Bounds) -> str:
    extent = bounds[-1]
    fits = []
    for parts in range(1, len(bounds) - 1):
        try:
            even = split(extent, parts, '')
            moves(reach, even, placed(reach, even, ''), '')
        except BadInput:
            continue
        fits.append(str(parts))
    where = f'divided into {" or ".join(fits)}'
    return f'it can be {where}' if fits else 'it is too small, undivided as well'


def _said(reach: Window) -> str:
    said = str(reach).replace('Window', 'A window')
    return said.replace('TransposedWindow', 'A transposed convolution').replace('(', ' (', 1)


def _parts(bounds: Bounds) -> str:
    sizes = [end - begin for begin, end in pairwise(bounds)]
    return f'{len(sizes)} parts ({", ".join(map(str, sizes))})'
