"""The clock of a run, and a clock that was set back, apart from one that is adjusted."""

import pytest

from parsl_freetrain.host.clocks import ClockSteps, RunClock


def test_each_step_back_is_told_once() -> None:
    times = [100.0]
    steps = ClockSteps(lambda: times[-1])
    for now, back_s in ((100.0, 0.0), (99.5, 0.0), (5000.0, 0.0), (1400.0, 3600.0), (1400.0, 0.0)):
        times.append(now)
        assert steps.set_back_s() == back_s


@pytest.mark.parametrize('step_s', [3600.0, -3600.0])
def test_no_step_of_the_computers_clock_moves_it(step_s: float) -> None:
    wall, steady = 1e9, 50.0
    clock = RunClock(lambda: wall, lambda: steady)
    wall, steady = wall + 5.5, steady + 5.0
    assert (clock(), clock.ahead_s, clock.of_wall(2e9)) == (1e9 + 5, 0.0, 2e9), 'no step'
    wall += step_s
    assert clock() == 1e9 + 5
    ends_in_s = 100.0
    assert clock.of_wall(wall + ends_in_s) == clock() + ends_in_s
    assert clock.of_wall(None) is None
