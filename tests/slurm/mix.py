"""Seeded mixes of other people's jobs: pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

EARLY_S = 3.0  # jobs end so long before their limit, in seconds


@dataclass(frozen=True)
class Ordinary:
    """One job of another user: submitted ``at_s`` seconds after the start, with a limit in Slurm's
    minutes.
    """

    at_s: float
    nodes: int
    minutes: int
    run_s: float


def known(seed: int, nodes: int, jobs: int, longest_min: int) -> list[Ordinary]:
    """Jobs that the scheduler knows from the beginning, and that take about as long as they say:
    its plans come true.

    Widths are between one node and all of them, so that some are wider than what is idle.
    """
    draw = random.Random(seed)
    return [
        Ordinary(0.0, _width(draw, nodes), minutes, 60.0 * minutes - EARLY_S)
        for minutes in (draw.randint(1, longest_min) for _ in range(jobs))
    ]


def arriving(seed: int, nodes: int, jobs: int, over_s: float, longest_s: float) -> list[Ordinary]:
    """Jobs that come one after the other, unforeseen, and often end long before their limit."""
    draw = random.Random(seed)
    times = sorted(draw.uniform(0.0, over_s) for _ in range(jobs))
    lengths = [draw.uniform(5.0, longest_s) for _ in range(jobs)]
    return [
        Ordinary(
            round(at, 1),
            _width(draw, nodes),
            max(1, round(1.5 * length / 60 + 0.5)),
            round(length, 1),
        )
        for at, length in zip(times, lengths, strict=True)
    ]


def _width(draw: random.Random, nodes: int) -> int:
    """Narrow ones are the most frequent."""
    return min(
        nodes,
        int(2 ** draw.uniform(0.0, 1.05 * nodes.bit_length() - 1.0))
        if draw.random() < 0.8
        else nodes,
    )
