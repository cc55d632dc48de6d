"""Nodes of blocks that waiting jobs of others would start on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeDemand:
    """A waiting job of others that would start now if some nodes of our blocks were given back; or
    a reservation of such nodes that begins soon.

    Attributes
    ----------
    job
        Its id, or 'reservation' and its name.
    nodes
        Number of our nodes that it lacks.
    among
        The names of our nodes that would serve it.
    spare
        Those of them that a reservation or a planned job takes later, so that fewer other jobs
        could use them.
    shared
        Whether it is enough that they are given back: the scheduler has planned another job around
        them, and they may serve other jobs, too.
    """

    job: str
    nodes: int
    among: frozenset[str]
    spare: frozenset[str] = frozenset()
    shared: bool = False


def in_need(jobs: Iterable[str]) -> str:
    """The :attr:`NodeDemand.job` of several demands in words, each once."""
    return ', '.join(
        job if job.startswith('reservation ') else f'job {job}' for job in sorted(set(jobs))
    )


@dataclass(frozen=True)
class BlockNodes:
    """The nodes of an open block.

    Attributes
    ----------
    block
        Its id.
    nodes
        Their names.
    releasable
        Those that can be given back while the block goes on; all others only with the whole block.
    leaving
        Whether the scheduler takes them already.
    """

    block: str
    nodes: tuple[str, ...]
    releasable: frozenset[str] = frozenset()
    leaving: bool = False
