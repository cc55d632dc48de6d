"""The virtual clock: a recorded pool, trainers, and a controller which decides as in a live run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.replay.accounting import Accounts, RecordedJob
from parsl_freetrain.replay.result import PoolResult
from parsl_freetrain.replay.trace import PoolChange, Trace
from parsl_freetrain.replay.world import CurveLearning, Measuring, World

EVERYTHING = 'idle'


class Holes:
    """One for nodes that become idle and leave together; without ends, one for each node class."""

    def __init__(self, names: Sequence[str], apart: bool, classes: Sequence[str] = ()) -> None:
        self._names, self._apart = names, apart
        self._classes = classes or ('',) * len(names)
        self._block: dict[int, str] = {}
        self._size: dict[str, int] = {}

    def leave(self, change: PoolChange) -> tuple[ev.NodesLeft | None, list[ev.BlockClosed]]:
        left = change.left.tolist()
        if not left:
            return None, []
        closed: list[ev.BlockClosed] = []
        for node in left if self._apart else ():
            block = self._block.pop(node)
            self._size[block] -= 1
            if not self._size[block]:
                del self._size[block]
                closed.append(ev.BlockClosed(change.at, block))
        return ev.NodesLeft(change.at, tuple(self._names[node] for node in left)), closed

    def join(self, change: PoolChange) -> list[ev.NodesJoined]:
        alike: dict[tuple[float, str], list[int]] = {}
        for node, until in zip(change.joined.tolist(), change.known_until.tolist(), strict=True):
            alike.setdefault((until, self._classes[node]), []).append(node)
        events = []
        for (until, node_class), nodes in alike.items():
            block = f'{change.at:.3f}-{until:.3f}' if self._apart else EVERYTHING
            block += f'-{node_class}' if node_class else ''
            if self._apart:
                self._block.update(dict.fromkeys(nodes, block))
                self._size[block] = len(nodes)
            named = tuple(self._names[node] for node in nodes)
            end = None if math.isinf(until) else until
            events.append(ev.NodesJoined(change.at, block, named, end, node_class))
        return events


def run(
    trace: Trace,
    known_ends: bool,
    trainers: dict[str, RecordedJob],
    controller: Controller,
    learning: CurveLearning | None = None,
) -> PoolResult:
    """Train on a recorded pool as ``controller`` decides, once an instant; without time steps."""
    accounts = Accounts(trace.start_s)
    measuring = None if learning is None else Measuring(learning)
    world = World(controller, accounts, trainers, measuring)
    known = known_ends or not controller.settings.spans_blocks
    holes = Holes(trace.names, known, trace.node_classes)
    changes = trace.changes(known_ends)
    in_order = sorted(trainers.values(), key=lambda trainer: trainer.submit_s)
    within = [trainer for trainer in in_order if trainer.submit_s < trace.end_s]
    queue = [(max(trainer.submit_s, trace.start_s), trainer) for trainer in within]
    c = s = 0
    while True:
        completion = world.next_completion_s()
        at = min(
            changes[c].at if c < len(changes) else math.inf,
            queue[s][0] if s < len(queue) else math.inf,
            math.inf if completion is None else completion,
            controller.state.next_change_s(),
            world.next_measurement_s(),
        )
        if at > trace.end_s:
            break
        leaving: ev.NodesLeft | None = None
        closing: list[ev.BlockClosed] = []
        joining: list[ev.NodesJoined] = []
        if c < len(changes) and changes[c].at == at:
            leaving, closing = holes.leave(changes[c])
            joining = holes.join(changes[c])
            c += 1
        submitted: list[RecordedJob] = []
        while s < len(queue) and queue[s][0] == at:
            submitted.append(queue[s][1])
            s += 1
        world.happen(at, leaving, joining, closing, submitted)
    accounts.advance(trace.end_s)
    return accounts.outcome(trainers)
