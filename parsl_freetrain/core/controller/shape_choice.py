"""Which shape a trainer has on a node count for which several are stated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REPORTS = 3
"""Reports of the speed, with at least a step between two, after which a shape has been tried."""


@dataclass
class ShapeChoice:
    """Tries each shape of a node count when the trainer has that count, and then keeps the fastest.

    A shape that is tried is used until it has been reported :data:`REPORTS` times, in one fragment
    or in several. The choice is final, so that noise does not make a trainer change its shape.
    ``names``: the shapes by node count, in the order of tries; counts with one need not be there.
    """

    names: Mapping[int, tuple[str, ...]]
    _reports: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    _excluded: set[tuple[int, int]] = field(default_factory=set)

    def next(self, nodes: int) -> int:
        """The shape for the next fragment on ``nodes`` nodes, as its place in the list."""
        untried = [s for s in self._usable(nodes) if not self._tried(nodes, s)]
        return untried[0] if untried else self._fastest(nodes)

    def best(self, nodes: int) -> int:
        """The fastest shape that has been tried; the one that is tried first, if there is none."""
        tried = any(self._tried(nodes, s) for s in self._usable(nodes))
        return self._fastest(nodes) if tried else self.next(nodes)

    def observe(self, nodes: int, shape: int, rate: float) -> None:
        if not self._tried(nodes, shape):
            self._reports.setdefault((nodes, shape), []).append(rate)

    def change(self, nodes: int, shape: int) -> str:
        """Why a fragment in ``shape`` should go on in another one; empty: it should not."""
        then = self.next(nodes)
        if then == shape or not self._tried(nodes, shape):
            return ''
        name = self.names[nodes][then]
        if self._tried(nodes, then):
            return f'go on in the fastest shape, {name}'
        return f'try the shape {name}'

    def exclude(self, nodes: int, shape: int) -> bool:
        """Do not use a shape again; whether another one is left for this node count."""
        self._excluded.add((nodes, shape))
        return bool(self._usable(nodes))

    def _usable(self, nodes: int) -> list[int]:
        shapes = range(len(self.names.get(nodes, ('',))))
        return [s for s in shapes if (nodes, s) not in self._excluded]

    def _tried(self, nodes: int, shape: int) -> bool:
        return len(self._reports.get((nodes, shape), ())) >= REPORTS

    def _fastest(self, nodes: int) -> int:
        tried = [s for s in self._usable(nodes) if self._tried(nodes, s)]
        return max(tried, key=lambda s: self._reports[nodes, s][-1], default=0)
