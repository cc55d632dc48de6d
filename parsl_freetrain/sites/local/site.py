"""The local site: slots of this computer are its nodes, and a schedule says when they are idle."""

import math
import os
import random
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parsl.jobs.states import JobStatus

from parsl_freetrain.core.model.checked_settings import checked_arguments
from parsl_freetrain.core.model.checked_values import Positive, PositiveSeconds, Seconds
from parsl_freetrain.core.model.errors import BadInput, refuse
from parsl_freetrain.core.model.types import BlockRequest, Hole, NodeOffer
from parsl_freetrain.host import slot
from parsl_freetrain.sites.idle_schedule import IdleInterval, Schedule, check_class, read_schedule
from parsl_freetrain.sites.local.jobs import SlotJobs
from parsl_freetrain.sites.protocols import HoleGone

_OVER_S = 5.0  # after the schedule's end, until all of its blocks have ended

# Under 'mixed': mostly without warning, as on a real machine.
_MIX = (('kill', 0.6), ('notice', 0.25), ('known', 0.15))


@dataclass(frozen=True)
class _SlotBlock:
    """An open block; times in seconds of ``time.time()``, infinite where there is no end."""

    nodes: tuple[str, ...]
    end: float
    walltime_end: float
    how: str


class LocalSite:
    """This computer as a site: ``nodes`` slots that come and go as a schedule says. Raises BadInput
    for a site without a single usable node, a schedule that cannot be used, an unknown ``taken``,
    or a number out of range.

    Parameters
    ----------
    nodes
        The number of slots, or their names. Of a schedule with more nodes, the first ones in sorted
        order are used.
    schedule
        Idle intervals, or the CSV file that has them (see
        :func:`~parsl_freetrain.sites.idle_schedule.read_schedule`); None: every slot is always
        idle. Its time 0 is when the executor starts.
    time_factor
        Factor for all times of the schedule.
    repeat
        Whether the schedule begins anew at its end. Otherwise trainers that are left then fail.
    taken
        How nodes are taken at the end of their interval, always by SIGKILL: ``'kill'`` without
        warning; ``'notice'`` announced ``notice_s`` seconds before; ``'known'`` with the end known
        from the beginning; ``'mixed'`` one of these, mostly ``'kill'``, drawn for each group of
        intervals that end together.
    notice_s
        Time between a notice and the end, in seconds.
    seed
        For the random choice under ``'mixed'``.
    node_classes
        The class of each slot by its name, such as ``{'slot00': 'fast', 'slot01': 'slow'}``, to
        try out what is done where nodes are unequal. Default: as the schedule says, or all alike.
    class_speeds
        How fast the slots of some classes train, relative to this computer, such as ``{'slow':
        0.5}``: their ranks wait after each micro-batch. Default: all slots are equally fast.
    poll_s
        Seconds between two questions about blocks and holes.
    devices
        Which of this computer's accelerators each slot uses. ``'share'``: as many of its own as
        there are for each slot; where there are fewer than slots, several slots use one, and their
        ranks exchange through the CPU, with the same bits. ``'own'``: as that, and where there are
        fewer, training is refused. ``'none'``: slots train on CPUs.
    clock
        Wall-clock time in seconds.
    """

    name = 'local'
    is_local = True
    spans_blocks = True
    interface: str | None = 'lo'
    script_dir: str | None = None

    @checked_arguments('LocalSite')
    def __init__(
        self,
        nodes: int | Sequence[str] = 2,
        schedule: str | Path | Schedule | None = None,
        time_factor: Positive = 1.0,
        repeat: bool = False,
        taken: Literal['kill', 'notice', 'known', 'mixed'] = 'kill',
        notice_s: Seconds = 10.0,
        seed: int = 0,
        poll_s: PositiveSeconds = 0.5,
        node_classes: Mapping[str, str] | None = None,
        class_speeds: Mapping[str, float] | None = None,
        devices: Literal['share', 'own', 'none'] = 'share',
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.nodes, self.devices, self.schedule = nodes, devices, schedule
        self.time_factor, self.repeat, self.poll_s = time_factor, repeat, poll_s
        self.taken, self.notice_s, self.seed = taken, notice_s, seed
        self._clock = clock
        self._followed = _followed(nodes, schedule).scaled(time_factor)
        length_s = self._followed.end_s
        self._period_s = length_s if repeat and math.isfinite(length_s) else 0.0
        self._set_classes(node_classes or self._followed.node_classes, class_speeds or {})
        self._intervals: dict[str, list[IdleInterval]] = {name: [] for name in self._followed.nodes}
        for interval in self._followed.intervals:
            self._intervals[interval.node].append(interval)
        self._lock = threading.Lock()
        self._zero: float | None = None
        self._closed = False
        self._jobs = SlotJobs()
        self._open: dict[str, _SlotBlock] = {}
        self._freed_at: dict[str, float] = {}

    def _set_classes(
        self, node_classes: Mapping[str, str], class_speeds: Mapping[str, float]
    ) -> None:
        if node_classes and sorted(node_classes) != sorted(self._followed.nodes):
            each = f'a dict with the class of each of {", ".join(self._followed.nodes)}'
            refuse('LocalSite: node_classes', node_classes, each)
        self.node_classes, self.class_speeds = dict(node_classes), dict(class_speeds)
        for node, node_class in self.node_classes.items():
            check_class(node_class, f'LocalSite: node_classes of {node}')
        for name, speed in self.class_speeds.items():
            if name not in self.classes or not 0 < speed <= 1:
                raise BadInput(
                    f'LocalSite: class_speeds has {speed} for the class {name!r}; it must have '
                    'numbers above 0, and at most 1, for classes of its slots: '
                    f'{", ".join(self.classes) or "there are none"}.'
                )

    def __repr__(self) -> str:
        names = 'nodes schedule time_factor repeat taken notice_s seed poll_s node_classes '
        names += 'class_speeds devices'
        return (
            f'LocalSite({", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())})'
        )

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.node_classes.values())))

    @property
    def names(self) -> tuple[str, ...]:
        return self._followed.nodes

    @property
    def over_at(self) -> float | None:
        """When the schedule ends, in seconds of ``time.time()``; None: not started, or never."""
        end = math.inf if self._zero is None else self._zero + self._followed.end_s
        return end if math.isfinite(end) and not self.repeat else None

    @property
    def over(self) -> str:
        """Why there will be no more nodes; empty: there will be."""
        if self.over_at is None or self._clock() < self.over_at + _OVER_S:
            return ''
        return (
            f'the schedule of LocalSite has ended after {self._followed.end_s:g} s, so there will '
            'be no more nodes: give it a longer one, or repeat=True; the same call goes on from '
            'the checkpoint'
        )

    def start(self) -> None:
        """Begin the schedule; anew where the site was closed, by another Parsl configuration."""
        with self._lock:
            if self._zero is None or self._closed:
                self._zero, self._closed, self._freed_at = self._clock(), False, {}

    def close(self) -> None:
        """No holes from now on; blocks that are open follow the schedule to their end."""
        self._closed = True

    def holes(self) -> tuple[Hole, ...]:
        """Idle slots in no open block; a hole: of one class, freed together, with one known end."""
        now = self._clock()
        with self._lock:
            free = self._free(now)
        groups: dict[tuple[float, float, str], list[str]] = {}
        for node, interval in free.items():
            since = max(interval.start_s, self._freed_at.get(node, 0.0))
            end = self._known(self._how(interval.end_s), self._epoch(interval.end_s), now)
            groups.setdefault((since, end, self.node_classes.get(node, '')), []).append(node)
        return tuple(
            Hole(
                len(names),
                until_s=end if math.isfinite(end) else None,
                names=tuple(names),
                node_class=node_class,
            )
            for (_, end, node_class), names in sorted(groups.items())
        )

    def open_block(
        self, request: BlockRequest, command: str, name: str, worker_init: str = ''
    ) -> str:
        """Start the command on the slots; the schedule takes them away again."""
        with self._lock:
            now = self._clock()
            free = self._free(now)
            names = self._choose(request, free)
            taken_s = min(free[node].end_s for node in names)
            block = _SlotBlock(
                names,
                self._epoch(taken_s),
                math.inf if request.walltime_s is None else now + request.walltime_s,
                self._how(taken_s),
            )
            end = min(block.end, block.walltime_end)
            job_id = self._jobs.start(
                Path(self.script_dir or '.').absolute(),
                name,
                names,
                end if math.isfinite(end) else None,
                command,
                worker_init,
                {node: self._variables(node) for node in names},
            )
            self._open[job_id] = block
        return job_id

    def _variables(self, node: str) -> dict[str, str]:
        number = self.names.index(node)
        told = {slot.DEVICES_VARIABLE: f'{self.devices} {number} {len(self.names)}'}
        node_class = self.node_classes.get(node, '')
        if node_class in self.class_speeds:
            told[slot.SPEED_VARIABLE] = repr(self.class_speeds[node_class])
        return told

    def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        return [self._jobs.status(job_id) for job_id in job_ids]

    def cancel(self, job_ids: Sequence[str]) -> None:
        """End the blocks; when it returns, no process of theirs is left."""
        self._jobs.cancel(job_ids)

    def _choose(self, request: BlockRequest, free: dict[str, IdleInterval]) -> tuple[str, ...]:
        request.check()
        strange = [name for name in request.names if name not in self._intervals]
        if strange or request.nodes > len(self._intervals):
            raise BadInput(
                f'LocalSite: {request.nodes} nodes {strange or ""} were asked for; '
                f'this site has the nodes {", ".join(self.names)}.'
            )
        names = request.names or tuple(list(free)[: request.nodes])
        missing = [name for name in names if name not in free]
        if missing or len(names) < request.nodes:
            said = missing or f'{request.nodes - len(names)} nodes'
            raise HoleGone(
                f'LocalSite: {said} were taken before the block was submitted; look at the holes '
                'again.'
            )
        return tuple(names)

    def gone(self, job_id: str) -> None:
        with self._lock:
            if block := self._open.pop(job_id, None):
                self._freed_at |= dict.fromkeys(block.nodes, self._clock() - (self._zero or 0.0))

    def end_of(self, job_id: str) -> float | None:
        with self._lock:
            block = self._open.get(job_id)
        if block is None:
            return None
        end = min(block.walltime_end, self._known(block.how, block.end, self._clock()))
        return end if math.isfinite(end) else None

    def offers(self, since: float, until: float) -> tuple[NodeOffer, ...]:
        """The schedule itself, clipped; empty before the start."""
        if self._zero is None:
            return ()
        length = self._period_s or math.inf
        first, last = (max(0, int((at - self._zero) // length)) for at in (since, until))
        clipped = (
            NodeOffer(
                each.node,
                max(since, self._epoch(each.start_s + number * self._period_s)),
                min(until, self._epoch(each.end_s + number * self._period_s)),
            )
            for number in range(first, last + 1)
            for each in self._followed.intervals
        )
        return tuple(offer for offer in clipped if offer.end > offer.start)

    def _epoch(self, at_s: float) -> float:
        return (self._zero or 0.0) + at_s

    def _interval(self, node: str, now: float) -> IdleInterval | None:
        at_s = now - (self._zero or 0.0)
        begun_s = at_s - at_s % self._period_s if self._period_s else 0.0
        at_s -= begun_s
        place = bisect_right(self._intervals[node], at_s, key=lambda each: each.start_s) - 1
        if place < 0 or at_s >= (found := self._intervals[node][place]).end_s:
            return None
        return IdleInterval(found.start_s + begun_s, found.end_s + begun_s, node)

    def _free(self, now: float) -> dict[str, IdleInterval]:
        if self._zero is None or self._closed:
            return {}
        taken = {node for block in self._open.values() for node in block.nodes}
        present = {node: self._interval(node, now) for node in self.names if node not in taken}
        return {node: interval for node, interval in present.items() if interval is not None}

    def _how(self, end_s: float) -> str:
        if self.taken != 'mixed':
            return self.taken
        # Seeded by the end alone: nodes that are taken together are taken in the same way.
        draw = random.Random(f'{self.seed}:{end_s!r}')
        return draw.choices([how for how, _ in _MIX], [weight for _, weight in _MIX])[0]

    def _known(self, how: str, end: float, now: float) -> float:
        """This end, where it is known by now; otherwise infinite."""
        known = how == 'known' or (how == 'notice' and now >= end - self.notice_s)
        return end if known else math.inf


def _followed(nodes: int | Sequence[str], schedule: str | Path | Schedule | None) -> Schedule:
    """The schedule of the site's own slots, in its own time."""
    names = () if isinstance(nodes, int) else tuple(nodes)
    count = nodes if isinstance(nodes, int) else len(names)
    if count < 1 or isinstance(nodes, str):
        refuse('LocalSite: nodes', nodes, 'a number of slots, at least 1, or a list of their names')
    if len(set(names)) != len(names):
        raise BadInput(f'LocalSite: the node names {list(names)} must differ from each other.')
    if schedule is None:
        width = max(2, len(str(count - 1)))
        return Schedule(
            IdleInterval(0.0, math.inf, name)
            for name in names or [f'slot{i:0{width}d}' for i in range(count)]
        )
    source = schedule if isinstance(schedule, Schedule) else read_schedule(schedule)
    where = 'the schedule' if isinstance(schedule, Schedule) else os.fspath(schedule)
    strange = [name for name in names if name not in source.nodes]
    if strange:
        raise BadInput(
            f'LocalSite: {where} has no idle interval of the nodes {", ".join(strange)}; '
            f'name nodes that it has, such as {", ".join(source.nodes[:3])}.'
        )
    followed = source.only(names or source.nodes[:count])
    if not len(followed):
        raise BadInput(
            f'LocalSite: {where} has no idle interval; the site needs at least one node '
            'that is idle some time.'
        )
    return followed
