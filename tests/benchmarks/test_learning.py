"""How much learned scaling curves cost against known ones; ``make bench BENCH_ARGS='-k learned'``.
Saturating curves are made up: n / (1 + (n - 1) / h), 1 <= h <= 100, a fifth slower beyond 16 nodes.
The published ones are of the public Summit trace. Nothing is asserted here.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.controller.throughput_profile import (
    Evidence,
    Posterior,
    Profile,
    points,
    shapes,
)
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
Curve = Callable[..., ScalingCurve]
PLAIN = Profile.curve
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
    for name, trainers in (
        ('saturating', saturating(1, 1000)),
        ('published', published),
        ('published, by network', by_network(published)),
    ):
        for at_a_time in (10, 30):
            found = learned(trace, trainers, at_a_time)
            print(
                f'  {name:24} {at_a_time:3} at a time   {ratio(found):.4f}   {found.wall_s:.0f} s'
            )


def ratio(found: ReplayResult) -> float:
    assert found.oracle is not None
    return found.oracle.learned_work / found.oracle.work


def hoping(optimism: float) -> Curve:
    return lambda self, most, assumed, _=0.0: PLAIN(self, most, assumed, optimism)


def until_three(
    self: Profile, most: int, assumed: float, optimism: float | None = None
) -> ScalingCurve:
    if optimism is None:
        known = {n for profile in (self, *self.related) for n in profile.measured}
        optimism = 1.5 if len(known) < 3 else 0.0
    return PLAIN(self, most, assumed, optimism)


def thompson(draw: np.random.Generator) -> Curve:
    """A curve drawn from what is known, and drawn again with each new measurement."""
    drawn: dict[tuple[int, int], tuple[Evidence, ScalingCurve]] = {}

    def curve(self: Profile, most: int, assumed: float, _: float = 0.0) -> ScalingCurve:
        own, key = self.evidence, (id(self), most)
        if own is None:
            return PLAIN(self, most, assumed, 0.0)
        if key not in drawn or drawn[key][0] is not own:
            posterior = Posterior(own, self._related(), assumed)
            i = int(draw.choice(len(posterior._share), p=posterior._share))
            counts = points(most)
            rates = np.exp(posterior._start[i] + shapes(counts)[i])
            drawn[key] = own, ScalingCurve(tuple(counts), tuple(rates.tolist()))
        return drawn[key][1]

    return curve


def largest_first(self: Profile, most: int, assumed: float, _: float = 0.0) -> ScalingCurve:
    """Three sizes of each network are measured, the largest first, then half and a quarter of it:
    the order of MalleTrain's job profiling advisor, since a change to fewer nodes is the cheaper.
    """
    known = {n for profile in (self, *self.related) for n in profile.measured}
    if self.stated is None and len(known) < 3 and most >> len(known):
        return ScalingCurve((most >> len(known),), (assumed * (most >> len(known)),))
    return PLAIN(self, most, assumed, 0.0)


def steady(first: int, trainers: tuple[ReplayTrainer, ...]) -> ReplayResult:
    """Ten endless trainers on 56 nodes that stay for 6 h."""
    endless = tuple(
        replace(t, submit_s=0.0, trainer=replace(t.trainer, total_samples=10**15))
        for t in trainers[first : first + 10]
    )
    pool = constant_pool(synthetic(0).window(until=6 * 3600), 56)
    return learned(pool, endless, 10)


def test_ways_to_explore_for_learned_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, made_up = summit(), saturating(1, 1000)
    print(f'\nNormalised work with learned curves / with known ones, 10 at a time ({MACHINE})')
    for name, curve in (
        ('no hopes', hoping(0.0)),
        ('half a standard deviation', hoping(0.5)),
        ('a standard deviation', hoping(1.0)),
        ('Thompson', thompson(np.random.default_rng(0))),
        ('largest first', largest_first),
        ('1.5 until three counts', until_three),
        ('3, then 0.5', PLAIN),
    ):
        monkeypatch.setattr(Profile, 'curve', curve)
        stays = [ratio(steady(first, made_up)) for first in range(0, 40, 10)]
        changes = ratio(learned(trace, made_up, 10))
        print(f'  {name:28} Summit {changes:.4f}, 56 nodes for 6 h {fmean(stays):.4f}', flush=True)


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
