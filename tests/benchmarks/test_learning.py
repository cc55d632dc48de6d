"""What learned scaling curves cost against known ones: ``-k learned``. Saturating ones are made up:
n / (1 + (n - 1) / h), 1 <= h <= 100, a fifth slower beyond 16 nodes.
"""

import os
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.read import read_trace, synthetic
from parsl_freetrain.replay.result import ReplayResult
from parsl_freetrain.replay.scenario import Scenario, constant_pool, replay
from parsl_freetrain.replay.trace import Trace
from parsl_freetrain.replay.trainers import ReplayTrainer, read_trainers
from parsl_freetrain.replay.world import CurveLearning
from tests.benchmarks.workload import MACHINE

DATA = Path(__file__).resolve().parents[3] / 'shared/data'
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BEGIN_S, DAYS = 72_743.0, float(os.environ.get('LEARNING_DAYS', '6'))


def saturating(seed: int, count: int) -> tuple[ReplayTrainer, ...]:
    draw, found = random.Random(seed), []
    for i in range(count):
        half, one = 100 ** draw.random(), draw.uniform(500, 5000)
        power = draw.uniform(0.2, 1.0) if draw.random() < 0.2 else 0.0
        rates = tuple(one * n / (1 + (n - 1) / half) * min(16 / n, 1) ** power for n in COUNTS)
        curve, total = ScalingCurve(COUNTS, rates), int(one * 3600 * draw.uniform(5, 40))
        trainer = Trainer(f'J{i:04d}', 1, 64, total, curve, 18.0, 12.0)
        found.append(ReplayTrainer(trainer, 0.0, curve))
    return tuple(found)


def by_network(trainers: tuple[ReplayTrainer, ...]) -> tuple[ReplayTrainer, ...]:
    """Trainers with the same curve train the same function."""
    return tuple(
        replace(t, trainer=replace(t.trainer, function=str(t.trainer.curve))) for t in trainers
    )


def summit() -> Trace:
    idle = DATA / 'idle/summit-2021-02-week1.csv.gz'
    if not idle.exists():
        pytest.skip('the record of Summit is absent')
    return read_trace(idle, 1024, BEGIN_S, min(BEGIN_S + DAYS * 86_400, 604_800.0))


def learned(trace: Trace, trainers: tuple[ReplayTrainer, ...], at_a_time: int) -> ReplayResult:
    settings = ControllerSettings(metric='speedup', trainers_at_a_time=at_a_time)
    learning = CurveLearning(noise=0.1)
    return replay(Scenario(trace, trainers, settings, by_file=False, learning=learning))


def test_learned_curves() -> None:
    trace = summit()
    published = read_trainers(DATA / 'trainers/imagenet-speedup-1001.json.gz')
    print(f'\nNormalised work with learned curves / with known ones, noise 10 % ({MACHINE})')
    made = ('saturating', saturating(1, 1000)), ('published', published)
    for name, trainers in (*made, ('published, by network', by_network(published))):
        for at_a_time in (10, 30):
            found = learned(trace, trainers, at_a_time)
            print(f'  {name:24} {at_a_time:3} at a time {ratio(found):.4f}   {found.wall_s:.0f} s')


def ratio(found: ReplayResult) -> float:
    assert found.oracle is not None
    return found.oracle.learned_work / found.oracle.work


def steady(first: int, trainers: tuple[ReplayTrainer, ...]) -> ReplayResult:
    """Ten endless trainers on 56 nodes that stay for 6 h."""
    endless = tuple(
        replace(t, submit_s=0.0, trainer=replace(t.trainer, total_samples=10**15))
        for t in trainers[first : first + 10]
    )
    pool = constant_pool(synthetic(0).window(until=6 * 3600), 56)
    return learned(pool, endless, 10)


def test_sizes_tried_of_learned_curves() -> None:
    print(f'\nNode counts tried on 56 nodes that stay for 6 h, 10 trainers ({MACHINE})')
    published = read_trainers(DATA / 'trainers/imagenet-speedup-1001.json.gz')
    for name, trainers in (('saturating', saturating(1, 40)), ('published', published)):
        tried: list[int] = []
        ratios = []
        for first in range(0, 40, 10):
            found = steady(first, trainers)
            ratios.append(ratio(found))
            series, counts = found.trace.series, dict[str, set[int]]()
            for trainer, nodes in zip(series.span_trainer, series.span_nodes, strict=True):
                counts.setdefault(trainer, set()).add(int(nodes))
            tried += map(len, counts.values())
        shares = ', '.join(f'{n}: {tried.count(n)}' for n in sorted(set(tried)))
        print(f'  {name:12} {fmean(ratios):.4f}; trainers by number of counts: {shares}')
