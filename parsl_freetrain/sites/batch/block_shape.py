"""What is asked of a scheduler for one block, and under which name: pure."""

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
    nodes: int
    #: With ``least_s``, with which it may start: seconds, in the scheduler's steps.
    walltime_s: int
    least_s: int
    #: when it must have ended (``time.time()``); None: the walltime alone limits it
    deadline: int | None = None
    names: tuple[str, ...] = ()  #: which nodes; empty: any
    avoid: tuple[str, ...] = ()  #: which nodes not
    node_class: str = ''  #: of the nodes, where the site config tells them apart
    hole_s: int | None = field(default=None, compare=False)  #: seconds until the deadline


@dataclass(frozen=True)
class Output:
    name: str
    stdout: str
    stderr: str


def shape_for(
    nodes: int,
    hole_s: float | None,
    names: tuple[str, ...],
    options: BatchOptions,
    limit_s: float,
    now: float,
    step_s: int = 60,
    shortest_s: float = 0.0,
) -> BlockShape:
    """The block that fits a hole of ``hole_s`` seconds (None: nothing is planned) from ``now`` on.
    Walltimes are rounded down to ``step_s``; the scheduler is told when the hole ends: it drops a
    block that could not end before, and shortens one that could.
    """
    least = max(step_s, math.ceil(shortest_s / step_s) * step_s)
    wanted = options.unplanned_s if hole_s is None else max(float(least), hole_s - options.start_s)
    walltime_s = max(least, math.floor(min(wanted, limit_s) / step_s) * step_s)
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
    return _NAME.fullmatch(name) is not None


def is_block_of(run: str, name: str) -> bool:
    return is_block(name) and name.startswith(f'{PREFIX}.{_plain(run)}.')


def class_in(name: str, classes: Iterable[str]) -> str:
    """Which of the classes the name of a block says; empty: none."""
    return next((c for c in classes if name.endswith(f'.on-{c}')), '')


def _plain(text: str) -> str:
    return re.sub(r'[^A-Za-z0-9_.-]', '_', text)
