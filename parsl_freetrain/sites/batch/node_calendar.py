"""When each node is free, as far as the scheduler knows: pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping


class NodeCalendar:
    """Which nodes are free, from now on. Sets of nodes are integers, one bit for each node.
    ``now``: in seconds. ``free_from``: sets of nodes by the time from which on they are free. Nodes
    in none of them never are. ``looks``: at how many times it had to be counted which are free.
    """

    def __init__(self, now: float, free_from: Mapping[float, int]) -> None:
        known = {now: 0}
        for time, members in free_from.items():
            if time < math.inf:
                known[max(time, now)] = known.get(max(time, now), 0) | members
        # Between two times, and after the last one, the same nodes are free.
        self._times = sorted(known)
        self._free: list[int] = []
        # What was asked for nodes like these: how many, how long, and when that could begin.
        self._found: dict[tuple[int, int], list[tuple[int, float, float]]] = {}
        self.looks = 0
        free = 0
        for time in self._times:
            free |= known[time]
            self._free.append(free)

    def take(self, begin: float, end: float, members: int) -> None:
        """These nodes are not free between two times; ``end`` may be infinite."""
        keep = ~members
        for place in range(self._index(begin), self._index(end)):
            self._free[place] &= keep

    def _index(self, time: float) -> int:
        """The place at which this time begins; that is made unless it is there."""
        if time == math.inf:
            return len(self._times)
        place = bisect_left(self._times, time)
        if place == 0:
            return 0
        if place == len(self._times) or self._times[place] != time:
            self._times.insert(place, time)
            self._free.insert(place, self._free[place - 1])
        return place

    def free(self, eligible: int, time: float, length_s: float) -> int:
        """Those that are free from ``time`` on for so long; with ``length_s`` 0, at that time."""
        place = max(0, bisect_right(self._times, time) - 1)
        eligible &= self._free[place]
        end = bisect_left(self._times, time + length_s)
        for later in range(place + 1, end):
            eligible &= self._free[later]
        return eligible

    def first_time(
        self, eligible: int, count: int, named: int, length_s: float
    ) -> tuple[float, int]:
        """When ``count`` of the eligible nodes are first free for ``length_s`` seconds, those that
        are ``named`` among them, and all that are free then; infinite: never.
        """
        # Nodes are only ever taken: no job begins before one that asked for less.
        before = self._found.setdefault((eligible, named), [])
        not_before = (at for less, short_s, at in before if less <= count and short_s <= length_s)
        begin, free = self._first(
            max(not_before, default=-math.inf), eligible, count, named, length_s
        )
        before.append((count, length_s, begin))
        return begin, free

    def _first(
        self, not_before: float, eligible: int, count: int, named: int, length_s: float
    ) -> tuple[float, int]:
        """As :meth:`first_time`, and at that time or later."""
        place = looked = bisect_left(self._times, not_before)  # up to where enough are free at each
        while place < len(self._times):
            end = max(place + 1, bisect_left(self._times, self._times[place] + length_s))
            while looked < end:
                self.looks += 1
                free = eligible & self._free[looked]
                looked += 1
                if free.bit_count() < count or named & ~free:
                    place = looked  # nothing can go on there
                    break
            else:
                free = self.free(eligible, self._times[place], length_s)
                if free.bit_count() >= count and not named & ~free:
                    return self._times[place], free
                place += 1
        return math.inf, 0
