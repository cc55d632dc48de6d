"""What is learned of a trainer's speed."""

import math
import random
from collections.abc import Callable, Sequence

import pytest

from parsl_freetrain.core.controller.throughput_profile import Profile
from parsl_freetrain.core.model.types import ScalingCurve

STATED = ScalingCurve((1, 4), (10.0, 30.0))


def usl(sigma: float, kappa: float, one: float = 100.0) -> Callable[[int], float]:
    return lambda n: one * n / (1 + sigma * (n - 1) + kappa * n * (n - 1))


def measured(
    rate: Callable[[int], float], counts: Sequence[int], noise: float = 0.0, times: int = 8
) -> Profile:
    draw, profile = random.Random(1), Profile(None)
    for n in counts:
        for _ in range(times):
            profile.observe(n, rate(n) * math.exp(draw.gauss(0, noise)))
    return profile


def test_a_stated_curve_is_used_whatever_is_measured() -> None:
    profile = Profile(STATED)
    assert profile.observe(2, 999.0) is False
    assert profile.curve(8, 1.0) is STATED


def test_without_a_measurement_the_assumed_rate_grows_below_linearly() -> None:
    curve = Profile(None).curve(8, 5.0)
    gains = [curve.rate_at(n + 1) - curve.rate_at(n) for n in range(8)]
    assert curve.rate_at(1) == pytest.approx(5.0)
    assert gains[1:] == sorted(gains[1:], reverse=True)
    assert all(gain > 0 for gain in gains)
    assert Profile(None).one_node_rate() is None


@pytest.mark.parametrize('sigma', [0.003, 0.02, 0.1, 0.5])
@pytest.mark.parametrize('kappa', [0.0, 3e-4, 3e-3])
def test_three_sizes_with_noise_tell_the_others(sigma: float, kappa: float) -> None:
    rate = usl(sigma, kappa)
    curve = measured(rate, (1, 8, 32), noise=0.1).curve(64, 1.0, optimism=0.0)
    for n in (1, 2, 4, 8, 16, 32, 48, 64):
        assert curve.rate_at(n) == pytest.approx(rate(n), rel=0.3)


def test_a_speed_that_falls_again_is_recognised() -> None:
    rate = usl(0.01, 0.004)  # fastest on 16 nodes
    assert 8 <= measured(rate, (4, 16, 32), noise=0.05).best_count(range(1, 65)) <= 28


def test_a_measured_count_is_what_was_measured_there_and_outliers_do_no_harm() -> None:
    profile = measured(lambda n: {2: 20.0, 4: 50.0}[n], (2, 4), times=15)
    for _ in range(7):
        profile.observe(4, 5000.0)
    assert profile.measured == {2: 20.0, 4: 50.0}
    curve = profile.curve(8, 1.0, optimism=0.0)
    assert curve.rate_at(2) == pytest.approx(20, rel=0.06)
    assert curve.rate_at(4) == pytest.approx(50, rel=0.06)


def test_trainers_of_the_same_function_learn_from_each_other() -> None:
    rate = usl(0.2, 0.0, one=37.0)
    new = Profile(None, [measured(rate, (1, 4, 16))])
    curve = new.curve(64, 5.0, optimism=0.0)
    for n in (1, 8, 64):
        assert curve.rate_at(n) == pytest.approx(rate(n), rel=0.15)
    new.observe(1, 300.0)  # another batch size: the shape is shared, the speed is its own
    curve = new.curve(64, 5.0, optimism=0.0)
    assert curve.rate_at(16) == pytest.approx(300 / 37 * rate(16), rel=0.2)


def test_what_asks_for_a_new_decision() -> None:
    profile = Profile(None)
    told = [profile.observe(1, 100.0) for _ in range(9)]
    assert told == [True, True, False, True, False, False, False, True, False]
    assert not any(profile.observe(1, 10.0) for _ in range(3))  # outliers
    assert any(profile.observe(1, 10.0) for _ in range(12))


@pytest.mark.parametrize('rate', [0.0, -1.0, math.nan, math.inf])
def test_what_is_not_a_speed_is_no_measurement(rate: float) -> None:
    profile = Profile(None)
    assert profile.observe(1, rate) is False
    assert profile.measured == {}


def test_the_best_count_is_the_smallest_that_trains_fastest() -> None:
    peak = ScalingCurve((1, 8, 16), (1.0, 9.0, 5.0))
    assert Profile(peak).best_count(range(1, 65)) == 8
    assert Profile(peak).best_count(range(10, 65)) == 10
    assert Profile(peak).best_count(range(1, 5)) == 4
    assert Profile(STATED).best_count(range(1, 65)) == 4
    assert Profile(None).best_count(range(1, 6)) == 5
    assert Profile(peak).best_count([2, 7, 12]) == 7
    assert Profile(peak).best_count([2, 16]) == 16
    assert Profile(peak).best_count([6, 16]) == 6
