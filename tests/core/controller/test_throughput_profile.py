"""What is learned of a trainer's speed."""

from __future__ import annotations

import math

import pytest

from parsl_freetrain.core.controller.throughput_profile import ASSUMED_EXPONENT, SMOOTHING, Profile
from parsl_freetrain.core.model.types import ScalingCurve

STATED = ScalingCurve((1, 4), (10.0, 30.0))


def test_a_stated_curve_is_used_whatever_is_measured() -> None:
    profile = Profile(STATED)
    assert profile.observe(2, 999.0) is False
    assert profile.curve(8, 1.0) is STATED
    assert profile.one_node_rate() == pytest.approx(999.0 / 2**ASSUMED_EXPONENT)


def test_without_a_measurement_the_assumed_rate_grows_below_linearly() -> None:
    curve = Profile(None).curve(8, 5.0)
    gains = [curve.rate_at(n + 1) - curve.rate_at(n) for n in range(8)]
    assert curve.rate_at(1) == 5.0
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 0 for gain in gains)
    assert Profile(None).one_node_rate() is None


def test_measured_counts_are_kept_and_the_others_follow_the_next_smaller_one() -> None:
    profile = Profile(None)
    assert profile.observe(2, 20.0) is True
    assert profile.observe(4, 50.0) is True
    curve = profile.curve(8, 1.0)
    assert (curve.rate_at(2), curve.rate_at(4)) == (20.0, 50.0)
    assert curve.rate_at(1) == pytest.approx(20 * 0.5**ASSUMED_EXPONENT)
    assert curve.rate_at(3) == pytest.approx(20 * 1.5**ASSUMED_EXPONENT)
    assert curve.rate_at(8) == pytest.approx(50 * 2**ASSUMED_EXPONENT)
    assert profile.one_node_rate() == pytest.approx(20 / 2**ASSUMED_EXPONENT)


def test_only_a_change_of_ten_per_cent_asks_for_a_new_decision() -> None:
    profile = Profile(None)
    assert profile.observe(1, 100.0)
    assert not profile.observe(1, 110.0)
    assert profile.measured[1] == 100.0 + SMOOTHING * 10.0
    assert profile.observe(1, 10.0)


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
