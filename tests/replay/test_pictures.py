"""The data of charts: trainers that ran at the same time, and means of steps over bins."""

import numpy as np
import pytest

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.pictures import lanes, means
from parsl_freetrain.replay.read import synthetic
from parsl_freetrain.replay.result import ReplayResult
from parsl_freetrain.replay.scenario import Scenario, replay
from parsl_freetrain.replay.trainers import ReplayTrainer

CURVE = ScalingCurve((0, 1, 16), (0.0, 10.0, 120.0))


@pytest.fixture(scope='module')
def result() -> ReplayResult:
    trainers = tuple(
        ReplayTrainer(Trainer(f't{i}', 1, 16, 20_000, CURVE, 18.0, 12.0), 0.0, CURVE)
        for i in range(30)
    )
    settings = ControllerSettings(trainers_at_a_time=4)
    return replay(Scenario(synthetic(2).window(100, None, 40_000.0), trainers, settings))


def test_the_bands_hold_all_node_seconds_that_were_used(result: ReplayResult) -> None:
    run = result.trace
    edges = np.linspace(run.start_s, run.end_s, 101)
    bands = [means(*lane, edges) for lane in lanes(run)]
    assert run.used_node_s > 0
    assert sum(float(band @ np.diff(edges)) for band in bands) == pytest.approx(run.used_node_s)
    series = run.series
    idle = means(series.times[:-1], series.times[1:], series.idle[:-1].astype(float), edges)
    assert float(idle @ np.diff(edges)) == pytest.approx(run.idle_node_s)
    assert np.all(sum(bands) <= idle + 1e-6)
