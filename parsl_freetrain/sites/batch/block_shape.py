"""What is asked of a scheduler for one block, and under which name: pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from parsl_freetrain.sites.batch.options import BatchOptions

PREFIX = 'freetrain'
# RUN.BLOCK.NUMBER[.on-CLASS]: a name that somebody gives to a job of his own is not like that
_NAME = re.compile(rf'{PREFIX}\.[\w.-]+\.[\w-]+\.[0-9a-f]{{6}}(\.on-[\w-]+)?', re.ASCII)


@dataclass(frozen=True)
class BlockShape:
    """What is asked of the scheduler for one block.

    Attributes
    ----------
    nodes
        Their number.
    walltime_s, least_s
        Walltime, and the minimum with which the scheduler may start it; in seconds, as multiples of
        the scheduler's steps.
    deadline
        When it must have ended, in whole seconds of ``time.time()``; None: the walltime alone
        limits it.
    names
        Which nodes; empty: any.
    avoid
        Which nodes not.
    node_class
        The class of the nodes, where the site config tells them apart.
    hole_s
        Seconds until the deadline.
    """

    nodes: int
    walltime_s: int
    least_s: int
    deadline: int | None = None
    names: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    node_class: str = ''
    hole_s: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Output:
    """Where a block's output goes, and its name."""

    name: str
    stdout: str
    stderr: str


def shape_for(
    nodes: int,
    hole_s: float | None,
    names: tuple[str, ...],
    options: BatchOptions,
    limit_s: float | None,
    now: float,
    step_s: int = 60,
    shortest_s: float = 0.0,
) -> BlockShape:
    """The block that fits a hole of ``hole_s`` seconds from ``now`` on.

    Walltimes are rounded down to the scheduler's steps after what it takes to start a job, and the
    scheduler is told when the hole ends: it drops a block that could not end before, and shortens
    one that could.

    Parameters
    ----------
    hole_s
        At least one step; None: nothing is planned.
    limit_s
        The queue's limit in seconds; None: none.
    step_s
        Of walltimes, in seconds.
    shortest_s
        The queue takes no shorter walltime, in seconds.
    """
    least = max(step_s, math.ceil(shortest_s / step_s) * step_s)
    wanted = options.unplanned_s if hole_s is None else max(float(least), hole_s - options.start_s)
    walltime_s = max(
        least, math.floor(min(wanted, math.inf if limit_s is None else limit_s) / step_s) * step_s
    )
    deadline = None if hole_s is None or options.preemptible else math.floor(now + hole_s)
    return BlockShape(
        nodes,
        walltime_s,
        max(least, math.floor(walltime_s / step_s * options.shrink) * step_s),
        deadline,
        names if options.pin_nodes else (),
        hole_s=None if hole_s is None else math.floor(hole_s),
    )


def job_name(run: str, block: str, node_class: str = '') -> str:
    """The name by which a block is found again: that of its run, its own, and its nodes' class."""
    of_class = f'.on-{node_class}' if node_class else ''
    return f'{PREFIX}.{_plain(run)}.{_plain(block)}{of_class}'


def is_block(name: str) -> bool:
    """Whether a job's name is that of a block, of whatever run."""
    return _NAME.fullmatch(name) is not None


def is_block_of(run: str, name: str) -> bool:
    """Whether a job's name is that of a block of this run."""
    return is_block(name) and name.startswith(f'{PREFIX}.{_plain(run)}.')


def class_in(name: str, classes: Iterable[str]) -> str:
    """Which of the classes the name of a block says; empty: none."""
    return next((c for c in classes if name.endswith(f'.on-{c}')), '')


def _plain(text: str) -> str:
    return re.sub(r'[^A-Za-z0-9_.-]', '_', text)
