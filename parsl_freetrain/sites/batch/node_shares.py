"""What is left of nodes that jobs share, by what the scheduler says, and until when; pure."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from parsl_freetrain.sites.batch.records import BatchJob, Nodes


class NodeCalendar:
    """Which nodes are free, from ``now`` on (seconds). Sets of nodes are integers, a bit for each.
    ``looks``: at how many times it had to be counted which are free.
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
        for later in range(place + 1, bisect_left(self._times, time + length_s)):
            eligible &= self._free[later]
        return eligible

    def first_time(
        self, eligible: int, count: int, named: int, length_s: float
    ) -> tuple[float, int]:
        """When and which ``count`` nodes, ``named`` ones too, are first free so long."""
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


MOST_TIMES = 64  # to which ends of jobs are put together: the first half, then every so many

Amounts = NDArray[np.float64]  # for each node (a row): CPUs, MiB of memory, GPUs
Caps = NDArray[np.float64]  # CPUs that a job could get of each node


class NodeShares:
    """What nodes have and jobs use; of ``unknown`` nobody tells. Sets of nodes: integers."""

    def __init__(
        self,
        now: float,
        total: Mapping[int, Nodes],
        uses: Iterable[tuple[BatchJob, int, float]],
        unknown: int,
    ) -> None:
        uses = list(uses)
        size = max(total, default=0) + 1
        self._total: Amounts = np.zeros((size, 3))
        for bit, group in total.items():
            self._total[bit] = group.cpus, group.memory, group.gpus
        ends = sorted({end for *_, end in uses if end < math.inf} | {now})
        half = MOST_TIMES // 2
        self._times = ends[:half] + ends[half :: max(1, len(ends) // half)]
        self._used = np.zeros((len(self._times), size, 3))
        for job, members, end in uses:
            self.take(now, end, members, job if job.cpus else None)
        self.take(now, math.inf, unknown)
        self._from: dict[tuple[object, ...], int] = {}  # when jobs alike could begin last

    def take(
        self,
        begin: float,
        end: float,
        members: int,
        job: BatchJob | None = None,
        caps: Caps | None = None,
    ) -> None:
        """These nodes are in use between two times: as far as a job uses them, or as a whole."""
        places = slice(max(0, bisect_right(self._times, begin) - 1), bisect_left(self._times, end))
        bits = np.flatnonzero(self._row(members))
        amounts = self._total[bits] if job is None else self._amounts(job, bits, caps)
        self._used[places, bits] += amounts

    def _amounts(self, job: BatchJob, bits: NDArray[np.int64], caps: Caps | None) -> Amounts:
        """What a job uses of its nodes: all it can of each, but something of every one."""
        if caps is None:  # it has them already: what those before it leave
            caps = np.floor(self._total[:, 0] - self._used[0, :, 0] + 1e-6)
        cpus = np.zeros(len(bits))
        for place, bit in enumerate(bits):
            most = job.cpus - cpus.sum() - job.step * (len(bits) - 1 - place)
            cpus[place] = max(0.0, min(caps[bit] - caps[bit] % job.step, most))
        cpus[-1:] += job.cpus - cpus.sum()
        memory = np.maximum(job.memory, cpus * job.memory_per_cpu)
        # More than a node has: it was not asked for each CPU.
        memory = np.where(memory > self._total[bits, 1], job.memory, memory)
        return np.stack((cpus, memory, np.full(len(bits), float(job.gpus))), axis=1)

    def caps(self, job: BatchJob, eligible: int, begin: float, length_s: float) -> Caps:
        """How many CPUs of each eligible node the job could have from a time on, for so long."""
        first = max(0, bisect_right(self._times, begin) - 1)
        last = max(first + 1, bisect_left(self._times, begin + length_s))
        used = self._used[first:last].max(axis=0)
        left = self._total - used
        caps = np.floor(left[:, 0] + 1e-6)
        if job.memory_per_cpu:  # where it may be asked for each CPU, and the node is not empty
            fits = np.floor(left[:, 1] / job.memory_per_cpu + 1e-6)
            caps = np.where(used[:, 0] > 0, np.minimum(caps, fits), caps)
        caps -= caps % job.step
        enough = (left[:, 1] >= job.memory) & (left[:, 2] >= job.gpus) & self._row(eligible)
        return np.where(enough, np.maximum(caps, 0.0), 0.0)

    def first_time(
        self, job: BatchJob, eligible: int, named: int, length_s: float
    ) -> tuple[float, int]:
        """When a job can first begin on these nodes (infinite: never), and all it can use then."""
        alike = job.cpus, job.step, job.memory, job.memory_per_cpu, job.nodes, job.gpus
        key = (*alike, job.least_nodes, length_s, eligible, named)
        for place in range(self._from.get(key, 0), len(self._times)):
            caps = self.caps(job, eligible, self._times[place], length_s)
            free = int.from_bytes(np.packbits(caps > 0, bitorder='little').tobytes(), 'little')
            least = job.least_nodes or job.nodes
            if free.bit_count() >= least and caps.sum() >= job.cpus and not named & ~free:
                self._from[key] = place
                return self._times[place], free
        self._from[key] = len(self._times)
        return math.inf, 0

    def _row(self, members: int) -> NDArray[np.bool_]:
        size = len(self._total)
        said = (members & ((1 << size) - 1)).to_bytes(-(-size // 8), 'little')
        return np.unpackbits(np.frombuffer(said, np.uint8), bitorder='little')[:size].astype(bool)


class Missing:
    """What a job still lacks: nodes, and CPUs where ``caps`` says how many each node has for it."""

    def __init__(self, job: BatchJob, caps: Caps | None) -> None:
        self.nodes = job.nodes if caps is None else job.least_nodes or job.nodes
        self._caps = caps
        self.cpus = 0.0 if caps is None else float(job.cpus)

    def __bool__(self) -> bool:
        return self.nodes > 0 or self.cpus > 0

    def first_of(self, sets: Iterable[int]) -> int:
        """The first nodes of the first set, then of the next, until nothing is missing."""
        chosen = 0
        for members in sets:
            if not self:
                break
            rest = members & ~chosen
            if self._caps is None and (count := rest.bit_count()) <= self.nodes:
                chosen, self.nodes, rest = chosen | rest, self.nodes - count, 0
            while rest and self:
                bit = rest & -rest
                rest &= rest - 1
                chosen |= bit
                self.nodes -= 1
                self.cpus -= 0.0 if self._caps is None else float(self._caps[bit.bit_length() - 1])
        return chosen

    def beyond(self, members: int) -> int:
        """How many nodes beyond these would be needed, at least."""
        count = self.nodes
        if self._caps is not None and members:
            each = [self._caps[bit] for bit in range(members.bit_length()) if members >> bit & 1]
            count = max(count, math.ceil(self.cpus / max(1.0, max(each))))
        return max(0, count - members.bit_count())
