"""Replays in which the controller learns the scaling curves from noisy measurements."""

import pytest
from msgspec import structs

from parsl_freetrain.core.controller.settings import ControllerSettings
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import ScalingCurve, Trainer
from parsl_freetrain.replay.read import synthetic
from parsl_freetrain.replay.scenario import Scenario, constant_pool, replay
from parsl_freetrain.replay.trainers import ReplayTrainer
from parsl_freetrain.replay.world import CurveLearning

COUNTS = (1, 2, 4, 8, 16, 32)
TRACE = synthetic(seed=3, nodes=200).window(None, 0, 20_000)


def saturating(name: str, half: float, falls: bool = False) -> ReplayTrainer:
    """Half of its time on one node cannot be divided beyond ``half`` nodes."""
    rates = tuple(
        100 * n / (1 + (n - 1) / half) * (0.6 if falls and n > 16 else 1.0) for n in COUNTS
    )
    curve = ScalingCurve(COUNTS, rates)
    return ReplayTrainer(Trainer(name, 1, 32, 10**9, curve, 18.0, 12.0), 0.0, curve)


TRAINERS = tuple(
    saturating(f't{half}', half, falls)
    for half, falls in ((2, False), (6, False), (20, True), (60, False), (100, True), (4, False))
)
SETTINGS, LEARNING = ControllerSettings(metric='speedup'), CurveLearning(noise=0.1, seed=5)
SCENARIO = Scenario(TRACE, TRAINERS, SETTINGS, by_file=False, learning=LEARNING)


def test_learned_curves_come_close_to_known_ones() -> None:
    learned = replay(SCENARIO)
    said = learned.as_json()
    assert learned.oracle is not None
    ratio = said['work_ratio']
    assert isinstance(ratio, float)
    assert 0.95 < ratio <= 1.01
    assert said['oracle_samples'] == learned.oracle.samples > 0
    told = replay(structs.replace(SCENARIO, learning=None))
    assert told.oracle is None and 'work_ratio' not in told.as_json()
    assert told.trace.samples == learned.oracle.samples
    again = replay(SCENARIO)
    assert again.trace.samples == learned.trace.samples


def test_other_counts_are_tried_where_the_pool_does_not_change() -> None:
    learned = replay(structs.replace(SCENARIO, trace=constant_pool(TRACE, 40)))
    assert learned.oracle is not None
    assert learned.oracle.learned_work > 0.93 * learned.oracle.work
    counts: dict[str, set[int]] = {}
    series = learned.trace.series
    for name, nodes in zip(series.span_trainer, series.span_nodes.tolist(), strict=True):
        counts.setdefault(name, set()).add(nodes)
    assert sum(map(len, counts.values())) <= 4 * len(counts)


def test_the_objective_of_the_file_would_tell_the_curves() -> None:
    with pytest.raises(BadInput, match='name one, such as objective = "speedup" in a study'):
        structs.replace(SCENARIO, by_file=True)
