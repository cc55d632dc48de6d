"""A problem that was recorded is the same problem when it is read."""

import json
import math

from parsl_freetrain.core.allocation.problem import (
    MOST_POINTS,
    Bid,
    Capacity,
    Limit,
    Problem,
    problem_in,
    record_of,
)
from parsl_freetrain.core.model.types import ScalingCurve

CURVE = ScalingCurve((0, 1), (0.0, 1.5))


def test_what_is_read_is_what_was_recorded() -> None:
    problem = Problem(
        120.0,
        5,
        (
            Bid('a', 1, 2, 1, 0.5, 0.0, CURVE, (1, 0), (1, 2), fixed=True),
            Bid('b', 1, 2, 0, 0.0, 0.0, CURVE, class_curves=(('gpu', CURVE),), mixed_parts=2),
        ),
        (Capacity('x', 3, math.inf), Capacity('y', 2, 30.0, 'gpu')),
        spans_blocks=False,
        limits=(Limit(('a',), least=1, why='share of user anna'), Limit(most=4)),
    )
    assert problem.held_fits and problem.seconds  # what is computed is not recorded
    assert problem_in(json.loads(json.dumps(record_of(problem)))) == problem


def test_a_problem_that_is_too_large_is_not_recorded() -> None:
    points = range(MOST_POINTS + 2)
    wide = ScalingCurve(tuple(points), tuple(map(float, points)))
    assert record_of(Problem(1.0, 2, (Bid('a', 1, 2, 0, 0, 0, wide),))) is None
