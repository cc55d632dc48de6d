"""Arithmetic on sets of seconds, as sorted disjoint half-open intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, sorted and disjoint; empty and backward intervals count for nothing."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """What two merged sets share."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            shared.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def subtract(left: list[Interval], right: list[Interval]) -> list[Interval]:
    """What a merged set has beyond another merged set."""
    rest: list[Interval] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        k = j
        while k < len(right) and right[k][0] < end:
            if start < right[k][0]:
                rest.append((start, right[k][0]))
            start = max(start, right[k][1])
            k += 1
        if start < end:
            rest.append((start, end))
    return rest


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """The merged part between ``start`` and ``end``."""
    return merge((max(a, start), min(b, end)) for a, b in intervals)


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def levels(changes: Iterable[tuple[float, int]], grid: Sequence[float]) -> list[int]:
    """The sum of (moment, change) pairs up to each moment of the grid, its own changes included."""
    ordered = sorted(changes)
    moments = [x for x, _ in ordered]
    heights = [0]
    for _, change in ordered:
        heights.append(heights[-1] + change)
    return [heights[bisect_right(moments, x)] for x in grid]
