"""What one training gets from holes whose nodes cannot all talk: pieces against one connected
fragment. ``python docs/apart_holes.py TRACE.csv.gz [--nodes N] [--days D]`` prints a table.

Groups of 1, 2, 4 ... nodes can talk, and no others. A synchronous training uses one at a time,
the replicas of a training in rounds one each. Their decisions are those of a live run, by the
controller; progress and costs are those of `freetrain replay`, and the end of each piece costs as
much as a loss of nodes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parsl_freetrain.core.controller.controller import Controller
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model import events as ev
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay import world
from parsl_freetrain.replay.accounting import Interruption, RecordedJob
from parsl_freetrain.replay.read import read_trace
from parsl_freetrain.replay.result import PoolResult
from parsl_freetrain.replay.trace import PoolChange, Trace
from parsl_freetrain.solver import allocator_named

RATE = 2831.0  # samples per second of one node: ShuffleNet, as in the published set of trainers
CURVE = ScalingCurve((0, 1, 2, 4, 8, 16), (0.0, RATE, 5259.0, 9988.0, 20379.2, 38895.3))
UP_S, DOWN_S, FOREVER = 18.0, 12.0, 10**15


class Groups(world.Holes):
    """Nodes of one group, by their number, are a block."""

    size = 1

    def leave(self, change: PoolChange) -> tuple[ev.NodesLeft | None, list[ev.BlockClosed]]:
        left = tuple(self._names[node] for node in change.left.tolist())
        return (ev.NodesLeft(change.at, left) if left else None), []

    def join(self, change: PoolChange) -> list[ev.NodesJoined]:
        groups: dict[int, list[str]] = {}
        for node in change.joined.tolist():
            groups.setdefault(node // self.size, []).append(self._names[node])
        return [ev.NodesJoined(change.at, f'g{g}', tuple(names)) for g, names in groups.items()]


@dataclass
class Replica(RecordedJob):
    goal: float = 0.0  # its own samples at the end of its piece

    def completion_s(self) -> float:
        return self.since + max(self.goal - self.samples, 0.0) / self.rate


class Rounds(world.World):
    def _ended(self, name: str, at: float, cause: Interruption | None) -> ev.FragmentEnded:
        run, done = self._runs[name], cause is None
        preempted = cause is Interruption.PREEMPTED
        assert isinstance(run, Replica)
        before = run.nodes, run.rate
        self._accounts.train(run, 0, 0.0)
        self._touched[name] = None
        self._interrupted.setdefault(name, (before, cause or Interruption.EXPIRED))
        spec, samples = run.trainer, max(run.samples, 0.0)
        if done:
            samples, length = run.goal, (spec.round_samples or 0) / spec.replicas
            run.goal += length
        told = round(samples * spec.replicas) if done else int(samples) * spec.replicas
        ending = ev.Ending.PREEMPTED if preempted else ev.Ending.STOPPED
        return ev.FragmentEnded(at, name, run.fragment, told, ending)


def replayed(trace: Trace, group: int, replicas: int, piece_s: float, overlap: int) -> PoolResult:
    """``replicas`` 0: synchronous; ``piece_s``: seconds of a piece on one node."""
    one = Trainer('r0', 1, min(group, 16), FOREVER, CURVE, rescale_up_s=UP_S, rescale_down_s=DOWN_S)
    runs: dict[str, RecordedJob] = {}
    for k in range(replicas or 1):
        if not replicas:
            runs['r0'] = Replica(one, trace.start_s, group, since=trace.start_s, goal=FOREVER)
            break
        own = round(piece_s * RATE)
        how: Any = {'training': 't', 'replicas': replicas, 'round_samples': own * replicas}
        spec = replace(one, name=f'r{k}', overlap=overlap, **how)
        runs[spec.name] = Replica(spec, trace.start_s, group, since=trace.start_s, goal=own)
    Groups.size = group
    together = group in (1, len(trace.names))  # what is of no matter to decide
    settings = ControllerSettings(spans_blocks=together, idle_block_s=float('inf'), retries=0)
    controller = Controller(allocator_named('auto', isolated=False), settings)
    return world.run(trace, False, runs, controller)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('trace')
    parser.add_argument('--nodes', type=int, default=256)
    parser.add_argument('--days', type=float, default=0.5)
    parser.add_argument('--from', dest='begin', type=float, default=72743.0, help='seconds')
    options = parser.parse_args(arguments)
    world.Holes, world.World = Groups, Rounds  # type: ignore[misc]
    trace = read_trace(
        options.trace, options.nodes, options.begin, options.begin + options.days * 86400
    )
    seconds = trace.end_s - trace.start_s
    print(f'{trace.idle_node_s() / seconds:.1f} nodes idle in the mean; thousand samples/s:')
    for group in (1, 2, 4, options.nodes):
        row = [replayed(trace, group, 0, 0, 0)]
        for replicas, piece_s, overlap in ((8, 600, 0), (8, 600, 1), (32, 600, 0), (32, 3600, 0)):
            row.append(replayed(trace, group, replicas, piece_s, overlap))
        rates = ' | '.join(f'{one.samples / seconds / 1000:.1f}' for one in row)
        print(f'| {group if group < options.nodes else "all"} | {rates} |', flush=True)


if __name__ == '__main__':
    main()
