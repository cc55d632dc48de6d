"""Seeded mixes of other people's jobs: pure."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Ordinary:
    """Jobs of another user that are submitted together.

    Attributes
    ----------
    at_s
        When, in seconds after the start.
    nodes, minutes, run_s
        What each asks for, its limit in Slurm's minutes, and how long it takes in seconds.
    tasks
        Number of jobs in an array; 1: no array.
    after
        Position in the mix of a job that has to be over before; None: of none.
    cpus
        Number of its tasks, of one CPU each, on nodes that it shares; 0: it gets whole nodes.
    node
        Number of a node that it asks for by name; 0: none.
    """

    at_s: float
    nodes: int
    minutes: int
    run_s: float
    tasks: int = 1
    after: int | None = None
    cpus: int = 0
    node: int = 0


@dataclass(frozen=True)
class Reserved:
    """Nodes that are set aside, ``at_s`` seconds after the start, for whole ``minutes``."""

    at_s: float
    nodes: int
    minutes: int


@dataclass(frozen=True)
class Mix:
    """Jobs in the order of their submission, and a reservation."""

    jobs: tuple[Ordinary, ...]
    reserved: Reserved | None = None


def untidy(seed: int, nodes: int, jobs: int, over_s: float, longest_s: float) -> Mix:
    """Jobs as users submit them: a few at the beginning, then in bursts and one by one; with limits
    2 to 10 times as long as they take; with arrays, dependencies, and a reservation of half of the
    nodes for maintenance.

    Parameters
    ----------
    jobs
        Number of submissions.
    over_s
        The last one comes by then, in seconds.
    longest_s
        Maximum time that a job takes, in seconds.
    """
    draw = random.Random(seed)
    times = sorted(_times(draw, jobs, over_s))
    made: list[Ordinary] = []
    for number, at_s in enumerate(times):
        run_s = round(draw.uniform(5.0, longest_s), 1)
        minutes = max(1, math.ceil(run_s * draw.uniform(2.0, 10.0) / 60))
        kind = draw.random()
        if kind < 0.2:
            made.append(Ordinary(at_s, 1, minutes, run_s, tasks=draw.randint(2, nodes)))
        else:
            after = draw.randrange(number) if number and kind > 0.8 else None
            made.append(Ordinary(at_s, _width(draw, nodes), minutes, run_s, after=after))
    # In the long form not whole minutes after the first jobs: none of them fits to the second.
    return Mix(tuple(made), Reserved(round(0.58 * over_s), max(1, nodes // 2), 1))


def sharing(seed: int, mix: Mix, cpus: int) -> Mix:
    """The mix on nodes of so many CPUs: two thirds of the jobs share them, some name one."""
    draw = random.Random(seed)
    jobs = []
    for job in mix.jobs:
        tasks = job.nodes * cpus - draw.randrange(cpus) if draw.random() < 0.67 else 0
        node = 1 + draw.randrange(3) if job.nodes == 1 and draw.random() < 0.15 else 0
        jobs.append(replace(job, cpus=tasks, node=node))
    return Mix(tuple(jobs), mix.reserved)


def _times(draw: random.Random, jobs: int, over_s: float) -> Iterable[float]:
    """A quarter at the start, a quarter in two bursts, the others at any time."""
    bursts = [draw.uniform(0.2, 0.9) * over_s for _ in range(2)]
    for number in range(jobs):
        if number < jobs / 4:
            yield 0.0
        elif number < jobs / 2:
            yield round(bursts[number % 2], 1)
        else:
            yield round(draw.uniform(0.0, over_s), 1)


def _width(draw: random.Random, nodes: int) -> int:
    """Narrow ones are the most frequent."""
    return min(
        nodes,
        int(2 ** draw.uniform(0.0, 1.05 * nodes.bit_length() - 1.0))
        if draw.random() < 0.85
        else nodes,
    )
