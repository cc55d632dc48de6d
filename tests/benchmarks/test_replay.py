"""How long replays take, from a seed and of a Summit week; no node stands idle beside a trainer."""

import multiprocessing
import resource
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.read import read_trace, synthetic
from parsl_freetrain.replay.scenario import Scenario, replay
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer
from tests.benchmarks.workload import MACHINE

SUMMIT = (
    Path(__file__).resolve().parents[3] / 'shared' / 'data' / 'idle' / 'summit-2021-02-week1.csv.gz'
)
CURVE = ScalingCurve((0, 1, 2, 4, 8, 16, 32, 64), (0.0, 1.0, 1.9, 3.6, 6.8, 12.6, 23.0, 41.0))
CASES = ((256, 10), (1024, 10), (1024, 30), (4734, 10), (4734, 100), (4734, 1000))


def backlog(trainers: int) -> tuple[ReplayTrainer, ...]:
    """More work than fits into the time, so that the maximum number of trainers always runs."""
    one = Trainer('t', 1, 64, 10**12, CURVE, 18.0, 12.0)
    return tuple(ReplayTrainer(replace(one, name=f't{i:04d}'), 0.0, CURVE) for i in range(trainers))


def line(name: str, trace: Trace, trainers: int) -> str:
    began = process_time()
    result = replay(
        Scenario(trace, backlog(trainers), ControllerSettings(trainers_at_a_time=trainers))
    )
    cpu_s = process_time() - began
    assert result.trace.node_s['stranded'] == 0
    found = result.as_json()
    decisions = found['decision_ms']
    assert isinstance(decisions, dict)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f'{name:24}{len(trace.names):6}{trainers:6}{found["events"]:8}'
        f'{found["wall_s"]:9.1f}{cpu_s:9.1f}   '
        f'{decisions["p50"]:8.2f}{decisions["p99"]:8.2f}{decisions["max"]:9.2f}{memory:9.0f} '
        f'MiB   U {result.efficiency:.3f}'
    )


@pytest.mark.timeout(3600)
def test_time_by_nodes_and_trainers() -> None:
    print(f'\nA replay of a week and its constant pool, one process; {MACHINE}')
    print(
        f'{"trace":24}{"nodes":>6}{"at a":>6}{"events":>8}{"wall s":>9}{"CPU s":>9}   '
        f'{"ms p50":>8}{"p99":>8}{"max":>9}{"memory":>9}'
    )
    # Each in a process of its own, so that memory is its own.
    with multiprocessing.get_context('spawn').Pool(1, maxtasksperchild=1) as pool:
        for nodes, trainers in CASES:
            print(pool.apply(made_up, (nodes, trainers)), flush=True)
            if SUMMIT.exists():
                print(pool.apply(recorded, (nodes, trainers)), flush=True)


def made_up(nodes: int, trainers: int) -> str:
    return line('--synthetic 1', synthetic(1).window(nodes), trainers)


def recorded(nodes: int, trainers: int) -> str:
    return line('Summit, week 1', read_trace(SUMMIT, nodes), trainers)
