"""A clock that was set back is told from one that goes on, or is adjusted."""

from parsl_freetrain.host.clocks import ClockSteps


def test_each_step_back_is_told_once() -> None:
    times = [100.0]
    steps = ClockSteps(lambda: times[-1])
    for now, back_s in ((100.0, 0.0), (99.5, 0.0), (5000.0, 0.0), (1400.0, 3600.0), (1400.0, 0.0)):
        times.append(now)
        assert steps.set_back_s() == back_s
