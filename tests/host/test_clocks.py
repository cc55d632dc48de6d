"""The clock of a run, one that was set back apart from one that is adjusted, and those of nodes.

Nodes whose clocks differ train on real clusters in tests/pbs/test_with_slurm.py.
"""

import logging
import math

import pytest

from parsl_freetrain.host.clocks import ClockSteps, NodeClocks, RunClock


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


def test_a_node_whose_clock_is_off_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clocks = NodeClocks()
    with caplog.at_level(logging.WARNING):
        clocks.measured('n1', 100.0, 101.0, 105.0)  # read between both, however long that took
        clocks.measured('n1', -math.inf, 90.0, 105.0)
        clocks.measured('n2', 100.0, 125.0, 105.0)
        clocks.measured('n2', 100.0, 126.0, 106.0)
        clocks.measured('n3', 100.0, 40.0, 105.0)
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition('. ')[0] for line in said] == [
        "The clock of node n2 is 20 s ahead of the submitting computer's",
        "The clock of node n3 is 60 s behind the submitting computer's",
    ]
