"""How much learned scaling curves cost against known ones; run by ``make bench BENCH_ARGS='-k
learned'``.

The trainers whose curves saturate are made up: the speed on n nodes is n / (1 + (n - 1) / h) times
that on one, with h between 1 and 100, and a fifth of them gets slower beyond 16 nodes. The
published ones are those of the public Summit trace. Nothing is asserted here.
"""

from __future__ import annotations

import os
import platform
import random
from dataclasses import replace
from pathlib import Path

import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.idle import read_idle
from parsl_freetrain.replay.measuring import CurveLearning
from parsl_freetrain.replay.scenario import Scenario, replay
from parsl_freetrain.replay.trainers import ReplayTrainer, read_trainers

DATA = Path(__file__).resolve().parents[3] / 'shared/data'
MACHINE = f'{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}'
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


def test_learned_curves() -> None:
    idle = DATA / 'idle/summit-2021-02-week1.csv.gz'
    if not idle.exists():
        pytest.skip('the record of Summit is absent')
    trace = read_idle(idle, 1024, BEGIN_S, min(BEGIN_S + DAYS * 86_400, 604_800.0))
    published = read_trainers(DATA / 'trainers/imagenet-speedup-1001.json.gz')
    print(f'\nNormalised work with learned curves / with known ones, noise 10 % ({MACHINE})')
    for name, trainers in (
        ('saturating', saturating(1, 1000)),
        ('published', published),
        ('published, by network', by_network(published)),
    ):
        for at_a_time in (10, 30):
            found = replay(
                Scenario(
                    trace,
                    trainers,
                    ControllerSettings(metric='speedup', trainers_at_a_time=at_a_time),
                    by_file=False,
                    learning=CurveLearning(noise=0.1),
                )
            )
            ratio = found.as_json()['work_ratio']
            assert isinstance(ratio, float)
            print(f'  {name:24} {at_a_time:3} at a time   {ratio:.4f}   {found.wall_s:.0f} s')
