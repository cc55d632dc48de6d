"""Dividing equal parts among workers of unequal speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace

# Of a rounding error in a number of parts.
_NEARLY = 1e-9


def deal(parts: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The number of parts of each worker, such that the last of them is done as early as possible.
    Speeds are above 0, in any unit; of equal ones, the first get more.
    """
    share = parts / sum(speeds)
    counts = [math.floor(share * speed + _NEARLY) for speed in speeds]
    heap = [((n + 1) / speed, i) for i, (n, speed) in enumerate(zip(counts, speeds, strict=True))]
    heapify(heap)
    for _ in range(parts - sum(counts)):
        _, i = heap[0]
        counts[i] += 1
        heapreplace(heap, ((counts[i] + 1) / speeds[i], i))
    return tuple(counts)


@lru_cache(maxsize=1 << 16)
def rate_together(parts: int, workers: tuple[tuple[float, int], ...]) -> float:
    """The rate, in the unit of the speeds, of workers who divide a batch of equal parts by
    :func:`deal`: a speed above 0 and how many workers have it, in turn.
    """
    speeds = [speed for speed, count in workers for _ in range(count)]
    last = max(n / speed for n, speed in zip(deal(parts, speeds), speeds, strict=True))
    return parts / last
