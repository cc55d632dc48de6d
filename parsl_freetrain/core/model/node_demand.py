"""Nodes of blocks that waiting jobs of others would start on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeDemand:
    """A job of others (or a reservation, or a drain) that would start if we gave nodes back."""

    job: str  # its id, or 'reservation' and its name, or 'drained' and the nodes
    nodes: int  # how many of ours it lacks
    among: frozenset[str]  # our nodes that would serve it
    # of these, what a reservation or a planned job takes later: fewer jobs could use them
    spare: frozenset[str] = frozenset()
    # giving back is enough: another job is planned around them, they may serve others
    shared: bool = False
    # of these, what the scheduler would give first if blocks had none: later jobs find the others
    first: frozenset[str] = field(default=frozenset(), compare=False)


def in_need(jobs: Iterable[str]) -> str:
    """The :attr:`NodeDemand.job` of several demands in words, each once."""
    named = (
        job if job.startswith(('reservation ', 'drained ')) else f'job {job}'
        for job in sorted(set(jobs))
    )
    return ', '.join(named)


@dataclass(frozen=True)
class BlockNodes:
    block: str
    nodes: tuple[str, ...]
    releasable: frozenset[str] = frozenset()  # while the block goes on
    leaving: bool = False  # the scheduler takes them already
