"""Which shapes trainers have had on their node counts, how fast they were, and what memory they
needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from parsl_freetrain.core.model.state import Fragment


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


def shapes_tried(fragments: Iterable[Fragment]) -> list[ShapeTried]:
    """By trainer and node count, in the order in which they were tried."""
    found: dict[tuple[str, int], dict[str, list[Fragment]]] = {}
    newest: dict[tuple[str, int], str] = {}
    for fragment in fragments:
        if fragment.shape:
            of = fragment.trainer, len(fragment.nodes)
            found.setdefault(of, {}).setdefault(fragment.shape, []).append(fragment)
            newest[of] = fragment.shape
    tried = []
    for of, shapes in sorted(found.items()):
        for shape, mine in shapes.items():
            rates = [f.seen.rate for f in mine if f.seen and f.seen.rate is not None]
            memory = max(f.ended.memory if f.ended else 0 for f in mine)
            rate = median(rates) if rates else None
            tried.append(ShapeTried(*of, shape, rate, newest[of] == shape, memory))
    return tried


def compared(tried: Iterable[ShapeTried]) -> list[ShapeTried]:
    """Those on node counts for which several have been tried."""
    tried = list(tried)
    counts = [(one.trainer, one.nodes) for one in tried]
    return [one for one in tried if counts.count((one.trainer, one.nodes)) > 1]
