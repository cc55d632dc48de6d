"""What has been measured of a trainer's fragments beside their speed: what a rescale costs, and how short a hole may be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from parsl_freetrain.core.words import Trainer
from parsl_freetrain.core.worth import shortest_useful_s

SMOOTHING = 0.5


@dataclass
class Measured:
    """Times in seconds; None: never measured.

    Attributes
    ----------
    up_s, down_s
        From the last step before a rescale to more, or to fewer, nodes to the first step after it; smoothed.
    start_s
        From the decision to the first step.
    step_s
        One global batch.
    checkpoint_s
        One checkpoint.

    Notes
    -----
    Each of the last three follows what is longer at once, and what is shorter by halves: a hole that is too short costs more than one
    that is left.
    """

    up_s: float | None = None
    down_s: float | None = None
    start_s: float | None = None
    step_s: float | None = None
    checkpoint_s: float | None = None

    def rescaled(self, *, up: bool, seconds: float) -> None:
        """Take in what a rescale has cost; what is no time (clocks that differ) counts for nothing."""
        if not 0 <= seconds < math.inf:
            return
        old = self.up_s if up else self.down_s
        new = seconds if old is None else old + SMOOTHING * (seconds - old)
        if up:
            self.up_s = new
        else:
            self.down_s = new

    def timed(self, start_s: float | None, step_s: float | None, checkpoint_s: float | None) -> None:
        """Take in a fragment's times, as far as it has any."""
        self.start_s, self.step_s, self.checkpoint_s = (
            _longer(self.start_s, start_s), _longer(self.step_s, step_s), _longer(self.checkpoint_s, checkpoint_s))

    def costs(self, trainer: Trainer) -> tuple[float, float]:
        """What a rescale to more, and to fewer, nodes is taken to cost.

        What the user stated, or else what was measured, or else a checkpoint and a start, which is all that it can be, or else what is
        assumed.
        """
        whole_s = None if self.start_s is None or self.checkpoint_s is None else self.start_s + self.checkpoint_s

        def cost(way: str, measured_s: float | None, said_s: float) -> float:
            if way in trainer.stated_costs:
                return said_s
            return next((seconds for seconds in (measured_s, whole_s) if seconds is not None), said_s)
        return cost('up', self.up_s, trainer.rescale_up_s), cost('down', self.down_s, trainer.rescale_down_s)

    def shortest_s(self, assumed_s: float) -> float:
        """The shortest hole that is worth a fragment; at least ``assumed_s`` while something has not been measured."""
        return shortest_useful_s(self.start_s, self.step_s, self.checkpoint_s, assumed_s)


def _longer(old: float | None, seconds: float | None) -> float | None:
    if seconds is None or not 0 < seconds < math.inf:
        return old
    return seconds if old is None else max(seconds, old + SMOOTHING * (seconds - old))
