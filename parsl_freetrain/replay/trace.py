"""A recorded trace: idle intervals of nodes, and what the scheduler's reservations promised."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from parsl_freetrain.core.model.errors import BadInput

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PoolChange:
    at: float  #: when, in seconds of the trace's clock
    joined: Ints  #: indices of the nodes that become idle, increasing
    #: Indices of nodes that become busy, increasing, before others join: one in both stays.
    left: Ints
    #: Until when each of ``joined`` stays idle, in seconds of the trace's clock, or infinite.
    known_until: Floats


@dataclass(frozen=True, eq=False)
class Trace:
    """Idle intervals of nodes within a window, by start, then node; BadInput for overlaps."""

    names: tuple[str, ...]  #: the nodes' names, by index
    #: With ``end_s``: the window, in seconds of the trace's clock. All intervals lie within it.
    start_s: float
    end_s: float
    starts: Floats  #: with ``ends``: start and end of each interval, in seconds
    ends: Floats
    nodes: Ints  #: the node of each interval, as an index into ``names``
    #: Until when reservations, as known at its start, leave the node alone: infinite if none does,
    #: its start if it was promised for no time. When a promise runs out, another interval follows.
    known_until: Floats
    node_classes: tuple[str, ...] = ()  #: the nodes' classes, by index; empty: nodes are alike

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and self.start_s < self.end_s < math.inf):
            raise BadInput(
                f'The window from {self.start_s:g} s to {self.end_s:g} s must end after its start.'
            )
        if not len(self.starts) == len(self.ends) == len(self.nodes) == len(self.known_until):
            raise BadInput('The columns of a trace must be equally long.')
        if self.node_classes and len(self.node_classes) != len(self.names):
            raise BadInput('A trace must give the class of each of its nodes, or of none.')
        order = np.lexsort((self.nodes, self.starts))
        for column in ('starts', 'ends', 'nodes', 'known_until'):
            kind = np.int64 if column == 'nodes' else np.float64
            ordered = np.asarray(getattr(self, column), dtype=kind)[order]
            ordered.setflags(write=False)
            object.__setattr__(self, column, ordered)
        self._check()

    def _check(self) -> None:
        bad = ~(self.starts < self.ends) | (self.starts < self.start_s) | (self.ends > self.end_s)
        for row in np.flatnonzero(bad)[:1].tolist():
            raise BadInput(
                f'An idle interval goes from {self.starts[row]:g} s to {self.ends[row]:g} s; it '
                f'must end after its start and lie within {self.start_s:g} s and {self.end_s:g} s.'
            )
        least, most = (self.nodes.min(), self.nodes.max()) if len(self.nodes) else (0, -1)
        if least < 0 or most >= len(self.names):
            raise BadInput(
                f'A trace has an interval of node {int(self.nodes.max())}; its '
                f'{len(self.names)} nodes are numbered from 0.'
            )
        if np.isnan(self.known_until).any():
            raise BadInput(
                'The known end of an interval is not a number; what is not known must be infinite.'
            )
        order = self._by_node()
        same = np.diff(self.nodes[order]) == 0
        for row in order[1:][same & (self.ends[order[:-1]] > self.starts[order[1:]])][:1].tolist():
            raise BadInput(
                f'Node {self.names[int(self.nodes[row])]} is idle from {self.starts[row]:g} s on, '
                'but already was before; the intervals of a node must not overlap.'
            )

    def _by_node(self) -> Ints:
        # 16 bits sort much faster.
        small = self.nodes.astype(np.uint16) if len(self.names) <= 1 << 16 else self.nodes
        return np.argsort(small, kind='stable')

    def __len__(self) -> int:
        return len(self.starts)

    def __repr__(self) -> str:
        return (
            f'<Trace: {len(self)} idle intervals of {len(self.names)} nodes from '
            f'{self.start_s:g} s to {self.end_s:g} s>'
        )

    def intervals(self, known_ends: bool = False) -> tuple[Floats, Floats, Ints, Floats]:
        """Starts, ends, nodes and known ends of the intervals, by start, then node; in seconds.
        ``known_ends`` False: every idle interval as observed, with an infinite end. True: a node is
        available as long as it was promised, no longer than it was idle.
        """
        if known_ends:
            there = self.known_until > self.starts
            known = self.known_until[there]
            return self.starts[there], np.minimum(self.ends[there], known), self.nodes[there], known
        starts, ends, nodes = self._merged()
        return starts, ends, nodes, np.full(len(starts), math.inf)

    def _merged(self) -> tuple[Floats, Floats, Ints]:
        if not np.isfinite(self.known_until).any():
            return self.starts, self.ends, self.nodes
        order = self._by_node()
        starts, ends = self.starts[order], self.ends[order]
        nodes, known = self.nodes[order], self.known_until[order]
        goes_on = (nodes[:-1] == nodes[1:]) & (ends[:-1] == starts[1:]) & (known[:-1] <= ends[:-1])
        first = np.concatenate([[True], ~goes_on])
        starts, ends, nodes = starts[first], ends[np.concatenate([~goes_on, [True]])], nodes[first]
        order = np.lexsort((nodes, starts))
        return starts[order], ends[order], nodes[order]

    def changes(self, known_ends: bool = False) -> tuple[PoolChange, ...]:
        """Every change of the pool, one an instant; nodes idle at first join, at last stay."""
        starts, ends, nodes, known = self.intervals(known_ends)
        order = np.lexsort((nodes, ends))
        order = order[ends[order] < self.end_s]
        ends, left = ends[order], nodes[order]
        at = np.unique(np.concatenate([starts, ends]))
        joins, leaves = _cuts(starts, at), _cuts(ends, at)
        each = zip(at.tolist(), joins, joins[1:], leaves, leaves[1:], strict=False)
        return tuple(PoolChange(t, nodes[a:b], left[c:d], known[a:b]) for t, a, b, c, d in each)

    def idle_node_s(self, known_ends: bool = False) -> float:
        starts, ends, _, _ = self.intervals(known_ends)
        return float((ends - starts).sum())

    def window(
        self, nodes: int | None = None, since: float | None = None, until: float | None = None
    ) -> 'Trace':
        """The first ``nodes`` in sorted order (None: all), clipped to ``since`` and ``until``
        (seconds), by the same clock. Raises BadInput where nothing is idle.
        """
        if nodes is not None and nodes < 1:
            raise BadInput(
                f'The first {nodes} nodes of a trace were asked for; at least 1 must be.'
            )
        start_s = self.start_s if since is None else float(since)
        end_s = self.end_s if until is None else float(until)
        whole = f'the trace goes from {self.start_s:g} s to {self.end_s:g} s'
        if not max(start_s, self.start_s) < min(end_s, self.end_s):
            raise BadInput(f'There is nothing between {start_s:g} s and {end_s:g} s; {whole}.')
        start_s, end_s = max(start_s, self.start_s), min(end_s, self.end_s)
        names = tuple(sorted(self.names)[:nodes])
        classes = dict(zip(self.names, self.node_classes, strict=False))
        place = {name: i for i, name in enumerate(names)}
        places = np.array([place.get(name, -1) for name in self.names], dtype=np.int64)
        renumbered = places[self.nodes]
        starts, ends = np.maximum(self.starts, start_s), np.minimum(self.ends, end_s)
        keep = (renumbered >= 0) & (starts < ends)
        if not keep.any():
            raise BadInput(
                f'None of {len(names)} nodes is idle from {start_s:g} s to {end_s:g} s; {whole}.'
            )
        of_class = tuple(classes[name] for name in names if classes)
        rows = starts[keep], ends[keep], renumbered[keep], self.known_until[keep]
        return Trace(names, start_s, end_s, *rows, of_class)

    @property
    def by_class(self) -> 'dict[str, Trace]':
        """The part of each node class; everything, under an empty name, where nodes are alike."""
        if not self.node_classes:
            return {'': self}
        kinds = np.array(self.node_classes)[self.nodes]
        fields = ('starts', 'ends', 'nodes', 'known_until')
        parts: dict[str, Trace] = {}
        for name in sorted(set(self.node_classes)):
            rows = {field: getattr(self, field)[kinds == name] for field in fields}
            parts[name] = replace(self, **rows)
        return parts


def _cuts(times: Floats, at: Floats) -> Sequence[int]:
    """The index in sorted ``times`` at which each of ``at`` begins, and the end of the last one."""
    cuts: list[int] = np.append(np.searchsorted(times, at), len(times)).tolist()
    return cuts
