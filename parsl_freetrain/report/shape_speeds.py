"""Which shapes trainers have had on their node counts, how fast they were, and what memory they
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from parsl_freetrain.ledger.rows import FragmentRow, ProgressRow, RunHistory

USED = 'ShapeUsed'
"""The kind of the ledger's events that name the shapes of fragments."""


@dataclass(frozen=True)
class ShapeTried:
    """A shape that a trainer has had.

    Attributes
    ----------
    rate
        Samples per second, the median of the last reports of its fragments; None: none has
        reported.
    newest
        Whether the trainer's last fragment on this node count had this shape.
    memory
        The most memory that a rank of its fragments needed, in bytes; 0: unknown.
    """

    trainer: str
    nodes: int
    shape: str
    rate: float | None
    newest: bool
    memory: int = 0


def shapes_tried(
    history: RunHistory,
    used: Iterable[Mapping[str, Any]],
    progress: Iterable[ProgressRow],
    measured: Iterable[Mapping[str, Any]],
) -> list[ShapeTried]:
    """By trainer and node count, in the order in which they were tried.

    Parameters
    ----------
    used
        The ledger's events of the kind :data:`USED`, oldest first.
    measured
        Its events of how long fragments took, which have the memory too.
    """
    needed = {
        (event['run'], event['trainer'], event['fragment']): event['detail'].get('memory', 0)
        for event in measured
    }
    rates = {
        (report.run, report.trainer, report.fragment): report.rate
        for report in progress
        if report.rate is not None
    }
    nodes = {fragment.key: len(fragment.nodes) for fragment in history.fragments}
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    newest: dict[tuple[str, int], str] = {}
    most: dict[tuple[tuple[str, int], str], int] = {}
    for event in used:
        key = (event['run'], event['trainer'], event['fragment'])
        if key in nodes:
            of, shape = (event['trainer'], nodes[key]), event['detail']['shape']
            seen = found.setdefault(of, {}).setdefault(shape, [])
            seen += [rates[key]] if key in rates else []
            newest[of] = shape
            most[of, shape] = max(most.get((of, shape), 0), needed.get(key, 0))
    return [
        ShapeTried(*of, shape, median(seen) if seen else None, newest[of] == shape, most[of, shape])
        for of, shapes in sorted(found.items())
        for shape, seen in shapes.items()
    ]


def shape_of(used: Iterable[Mapping[str, Any]], fragment: FragmentRow) -> str | None:
    """The shape of a fragment; None: its trainer has no shapes."""
    for event in used:
        if (event['run'], event['trainer'], event['fragment']) == fragment.key:
            return str(event['detail']['shape'])
    return None


def compared(tried: Iterable[ShapeTried]) -> list[ShapeTried]:
    """Those on node counts for which several have been tried."""
    tried = list(tried)
    counts = [(one.trainer, one.nodes) for one in tried]
    return [one for one in tried if counts.count((one.trainer, one.nodes)) > 1]
