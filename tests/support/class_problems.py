"""Random allocation problems with nodes of three classes."""

import random

from parsl_freetrain.core.allocation.problem import Bid, Capacity, Problem
from parsl_freetrain.core.model.types import ScalingCurve

CLASSES = {'a100': (1.0, 1.0), 'a40': (0.3, 0.9), 'cpu': (0.05, 0.5)}
"""Node classes, and the range of a trainer's speed on each, relative to the first."""
POINTS = (1, 2, 4, 8, 16, 32, 64)


def class_problem(
    draw: random.Random, trainers: int, nodes: int, classes: int = 3, horizon_s: float = 120.0
) -> Problem:
    """``nodes`` of each class; a third of the trainers wait, the others hold a few of one class."""
    names = list(CLASSES)[:classes]
    left, bids = [nodes] * classes, []
    for j in range(trainers):
        one, power = draw.uniform(500, 7000), draw.uniform(0.8, 0.97)
        curves = tuple(
            (
                name,
                ScalingCurve(
                    POINTS, tuple(one * speed * n**power * draw.uniform(0.95, 1.02) for n in POINTS)
                ),
            )
            for name in names
            for speed in [draw.uniform(*CLASSES[name])]
        )
        c = draw.randrange(classes)
        most = max(2 * classes * nodes // trainers, 1)
        count = min(left[c], draw.choice([0, draw.randint(1, most), draw.randint(1, most)]))
        left[c] -= count
        bids.append(
            Bid(
                f't{j}',
                1,
                64,
                count,
                draw.uniform(17, 19),
                draw.uniform(11, 13),
                curves[0][1],
                tuple(count if i == c else 0 for i in range(classes)),
                class_curves=curves,
                current_class=names[c] if count else '',
            )
        )
    blocks = tuple(Capacity(name, nodes, node_class=name) for name in names)
    return Problem(horizon_s, classes * nodes, tuple(bids), blocks)
