"""What the log of a run says: pauses, useful and repeated samples, CPU time; pure."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.versus.constants import BATCH
from tests.benchmarks.versus.machine import Step

RANK, NODE, BLOCK, ARRIVAL = 'rank killed', 'node killed', 'node of a block killed', 'arrival'
_WARM_UP = 3  # steps that are not counted


@dataclass(frozen=True)
class Event:
    """Something that happened to the training at a time; ``nodes`` are those there are after it."""

    kind: str
    at: float
    nodes: int


@dataclass(frozen=True)
class Run:
    """One run of a system under the plan. Times in seconds of ``time.time()``."""

    commanded: float
    ended: float
    nodes: int  # at the beginning
    events: tuple[Event, ...]
    steps: tuple[Step, ...]


def next_step(run: Run, event: Event) -> float | None:
    """Seconds from an event to the end of the first step begun after it, or None."""
    until = min((e.at for e in run.events if e.at > event.at), default=run.ended)
    ends = [
        step.ended
        for step in run.steps
        if event.at < step.begun
        and step.ended < until
        and (event.kind != ARRIVAL or step.world == event.nodes)
    ]
    return min(ends) - event.at if ends else None


def executions(steps: Sequence[Step]) -> dict[int, list[float]]:
    """By position, when each execution of the step, whose ranks' times overlap, ended first."""
    found: dict[int, list[float]] = {}
    for step in sorted(steps, key=lambda s: (s.position, s.begun)):
        ends = found.setdefault(step.position, [])
        if not ends or step.begun >= ends[-1]:
            ends.append(step.ended)
        else:
            ends[-1] = min(ends[-1], step.ended)
    return found


@dataclass(frozen=True)
class Work:
    """What a run came to from the end of its first step on."""

    useful: int
    repeated: int
    samples_per_s: float
    goodput: float


def work(run: Run) -> Work:
    """Samples trained, trained again, and their share of what the system's own speed allows."""
    begun = min(step.ended for step in run.steps)
    found = executions(run.steps)
    useful, all_ = BATCH * len(found), BATCH * sum(map(len, found.values()))
    speeds = speed_by_world(run.steps)
    changes = [(begun, run.nodes), *((e.at, e.nodes) for e in run.events), (run.ended, 0)]
    allowed = sum(
        (until - since) * speeds[min(speeds, key=lambda world: abs(world - nodes))]
        for (since, nodes), (until, _) in itertools.pairwise(changes)
    )
    return Work(useful, all_ - useful, useful / (run.ended - begun), useful / allowed)


def speed_by_world(steps: Sequence[Step]) -> dict[int, float]:
    """Samples per second on a number of ranks, from the median step."""
    taken: dict[int, list[float]] = {}
    for step in steps:
        taken.setdefault(step.world, []).append(step.ended - step.begun)
    return {world: BATCH / statistics.median(all_) for world, all_ in taken.items()}


def cpu_ms(run: Run) -> float | None:
    """CPU time of a rank's process for each step before the first event, in milliseconds."""
    until = min((event.at for event in run.events), default=run.ended)
    steps = [s for s in run.steps if s.ended < until and s.world == run.nodes]
    found = []
    for pid in {step.pid for step in steps}:
        mine = [step for step in steps if step.pid == pid][_WARM_UP:]
        if len(mine) > 1:
            found.append(1e3 * (mine[-1].cpu_s - mine[0].cpu_s) / (len(mine) - 1))
    return statistics.mean(found) if found else None


def same_bits(steps: Sequence[Step], undisturbed: Sequence[Step]) -> bool | None:
    """Whether all digests that both have at the same position are equal; None: there is none."""
    ours, theirs = digests(steps), digests(undisturbed)
    common = ours.keys() & theirs.keys()
    return all(ours[p] == theirs[p] for p in common) if common else None


def digests(steps: Sequence[Step]) -> dict[int, set[str]]:
    """By position, the digests of the weights after the step, on any rank, in any execution."""
    found: dict[int, set[str]] = {}
    for step in steps:
        if step.digest is not None:
            found.setdefault(step.position, set()).add(step.digest)
    return found
