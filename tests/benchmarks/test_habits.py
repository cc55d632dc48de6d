"""What habits of nodes give, and what decisions that know every end would: ``-k habits``. Learned
from the first 20 hours of the record of Summit, used in the other 6 days.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from parsl_freetrain.core.controller.node_habits import NodeHabits
from parsl_freetrain.core.controller.node_pool import PoolNode
from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.replay.habits import habits_of
from parsl_freetrain.replay.read import read_trace
from parsl_freetrain.replay.scenario import Scenario, replay
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import read_trainers

DATA = Path(__file__).resolve().parents[3] / 'shared/data'
LEARN_S, END_S = 72_743.0, 604_800.0


def summit(begin_s: float, end_s: float) -> Trace:
    idle = DATA / 'idle/summit-2021-02-week1.csv.gz'
    if not idle.exists():
        pytest.skip('the record of Summit is absent')
    return read_trace(idle, 1024, begin_s, end_s)


def shown(name: str, trace: Trace, at_a_time: int, habits: NodeHabits | None, known: bool) -> str:
    found = replay(
        Scenario(
            trace,
            read_trainers(DATA / 'trainers/hpo-shufflenet-1000.json.gz'),
            ControllerSettings(trainers_at_a_time=at_a_time, habits=habits),
            known_ends=known,
            time_limit_s=1.0,
        )
    )
    shares = {why: 100 * s / found.trace.idle_node_s for why, s in found.trace.node_s.items()}
    return (
        f'  {name:34} {at_a_time:3} at a time   U {found.efficiency:.4f}, at most '
        f'{found.efficiency_bound:.4f}; lost to preemptions '
        f'{shares["lost_to_preemption"]:.2f} %, rescales {shares["rescaling"]:.2f} %'
    )


class Knowing(NodeHabits, frozen=True, kw_only=True):
    """The order of nodes by their true ends; ``intervals``: starts and ends by name."""

    intervals: dict[str, tuple[list[float], list[float]]]

    def order(self, nodes: Iterable[PoolNode], at: float) -> list[str]:
        def end_s(node: PoolNode) -> float:
            starts, ends = self.intervals.get(node.name, ([-math.inf], [math.inf]))
            return ends[bisect_right(starts, at) - 1]

        return [node.name for node in sorted(nodes, key=lambda node: (-end_s(node), node.name))]


def knowing(trace: Trace) -> Knowing:
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in range(len(trace)):
        starts, ends = found.setdefault(trace.names[trace.nodes[row]], ([], []))
        starts.append(float(trace.starts[row]))
        ends.append(float(trace.ends[row]))
    return Knowing(hazard=habits_of(trace).hazard, intervals=found)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize('at_a_time', [10, 30])
def test_habits_and_an_oracle(at_a_time: int) -> None:
    learned, trace = habits_of(summit(0.0, LEARN_S)), summit(LEARN_S, END_S)
    oracle = knowing(trace)
    ends = np.where(trace.ends < trace.end_s, trace.ends, math.inf)
    told = replace(trace, known_until=ends)
    print(f'\nSummit, 1,024 nodes; hazard {learned.hazard}, {learned.together:.1f} together')
    for name, where, habits, known in (
        ('without habits', trace, None, False),
        ('habits', trace, learned, False),
        ('which nodes stay is known', trace, oracle, False),
        ('every end is known to decisions', told, oracle, True),
    ):
        print(shown(name, where, at_a_time, habits, known), flush=True)
