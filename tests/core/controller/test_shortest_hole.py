"""How short a hole may be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parsl_freetrain.core.controller.overheads import FLOOR_S, shortest_useful_s

SECONDS = st.floats(0, 1e6)


def test_start_one_step_and_two_checkpoints() -> None:
    shortest_s = shortest_useful_s(0.7, 0.2, 1.0, assumed_s=5.0)
    assert shortest_s == pytest.approx(0.7 + 0.2 + 2.0 + FLOOR_S)


def test_measured_holes_may_be_shorter_than_assumed_ones() -> None:
    assert shortest_useful_s(0.1, 0.1, 0.1, assumed_s=5.0) < 1.0
    assert shortest_useful_s(0.1, None, 0.1, assumed_s=5.0) == 5.0


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_what_is_not_known_makes_no_hole_shorter_than_assumed(
    start_s: float, step_s: float, checkpoint_s: float, assumed_s: float
) -> None:
    whole = shortest_useful_s(start_s, step_s, checkpoint_s, assumed_s)
    partly: list[tuple[float | None, float | None, float | None]] = [
        (None, step_s, checkpoint_s),
        (start_s, None, checkpoint_s),
        (start_s, step_s, None),
        (None, None, None),
    ]
    for start, step, checkpoint in partly:
        shortest_s = shortest_useful_s(start, step, checkpoint, assumed_s)
        assert assumed_s <= shortest_s <= max(whole, assumed_s)


@pytest.mark.parametrize(
    'bad', [(-1.0, 0.0, 0.0, 0.0), (0.0, math.nan, 0.0, 0.0), (0.0, 0.0, 0.0, math.inf)]
)
def test_times_that_are_none_are_refused(bad: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match='must be seconds'):
        shortest_useful_s(*bad)
