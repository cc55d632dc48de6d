"""The plan that each system goes through: nodes come, ranks and nodes are killed."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.versus.machine import Machine, Step, kill, machine
from tests.benchmarks.versus.measures import (
    ARRIVAL,
    BLOCK,
    NODE,
    RANK,
    Event,
    Run,
    digests,
    next_step,
)
from tests.benchmarks.versus.systems.protocol import System

NODES = 4
AT_FIRST = 3
_POLL_S = 0.2  # times come from the log, and looking costs the training CPU time


class NothingTrained(Exception):
    """A system has not made a step."""


def disturbed(system: System, folder: Path, gap_s: float, limit_s: float) -> tuple[Run, Run | None]:
    """Train under the plan, and kill all processes at the end.

    Parameters
    ----------
    gap_s
        Seconds between two events, at least: an event waits until the training has gone on after
        the one before, on all nodes there are.
    limit_s
        For how long it waits.

    Returns
    -------
    Run
        From the command until ``gap_s`` after the last event but that of the second value.
    Run | None
        The same run with the death of one node of a block with two; None if the system knows no
        blocks.

    Raises
    ------
    NothingTrained
        If the first step does not come within ``limit_s``.
    """
    with machine(folder) as here:
        commanded = time.time()
        system.start(here, [f'node{i}' for i in range(AT_FIRST)])
        if not until(lambda: any(s.world == AT_FIRST for s in here.steps()), limit_s):
            raise NothingTrained(f'No step on {AT_FIRST} nodes within {limit_s:g} s: see {folder}.')
        events: list[Event] = []

        def run() -> Run:
            return Run(commanded, time.time(), AT_FIRST, tuple(events), tuple(here.steps()))

        def happens(kind: str, nodes: int, what: Callable[[], object]) -> None:
            time.sleep(gap_s)
            what()
            events.append(Event(kind, time.time(), nodes))
            until(lambda: _goes_on(run(), events[-1]), limit_s)

        def killed(node: str) -> None:
            processes = here.of_node(node)
            system.leave(here, node)
            kill(processes)

        happens(ARRIVAL, 4, lambda: system.join(here, 'node3'))
        # A system that did not go on after the event before has no rank to kill, and goes on as
        # little after this one.
        until(lambda: bool(here.rank('node1')), limit_s)
        happens(RANK, 4, lambda: kill(here.rank('node1')))
        happens(NODE, 3, lambda: killed('node2'))
        happens(ARRIVAL, 4, lambda: system.join(here, 'node2'))
        time.sleep(gap_s)
        main = run()
        if not system.blocks:
            return main, None
        happens(BLOCK, 3, lambda: killed('node1'))
        return main, run()


def _goes_on(run: Run, event: Event) -> bool:
    """On all nodes: a system that goes on in two steps has to make both before the next event."""
    return next_step(run, event) is not None and any(
        step.begun > event.at and step.world == event.nodes for step in run.steps
    )


def undisturbed(system: System, folder: Path, disturbed: Run, limit_s: float) -> tuple[Step, ...]:
    """The steps of an undisturbed training, up to the first digest that differs."""
    expected = digests(disturbed.steps)

    def enough(here: Machine) -> bool:
        found = digests(here.steps())
        differ = any(found[p] != expected[p] for p in found.keys() & expected.keys())
        return differ or (bool(found) and max(found) >= max(expected, default=0))

    with machine(folder) as here:
        system.start(here, [f'node{i}' for i in range(AT_FIRST)])
        until(lambda: enough(here), limit_s)
        return tuple(here.steps())


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition; whether it came true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True
