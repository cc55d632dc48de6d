"""Measured times of a trainer's fragments, and the shortest hole that is worth a fragment."""

import math
from dataclasses import dataclass

from parsl_freetrain.core.model.types import Trainer

SMOOTHING = 0.5
FLOOR_S = 0.5  # minimum seconds that a fragment keeps free before its deadline


@dataclass
class Measured:
    """Seconds; None: never measured. A longer hole need counts at once, a shorter one by half."""

    up_s: float | None = None  # pause of a rescale to more nodes, from step to step, smoothed
    down_s: float | None = None  # the same to fewer nodes
    start_s: float | None = None  # from the decision to the first step
    step_s: float | None = None  # one global batch
    checkpoint_s: float | None = None

    def rescaled(self, *, up: bool, seconds: float) -> None:
        """Add a measured rescale. A value that is not a time (clocks that differ) is ignored."""
        if not 0 <= seconds < math.inf:
            return
        old = self.up_s if up else self.down_s
        new = seconds if old is None else old + SMOOTHING * (seconds - old)
        if up:
            self.up_s = new
        else:
            self.down_s = new

    def timed(
        self, start_s: float | None, step_s: float | None, checkpoint_s: float | None
    ) -> None:
        self.start_s = _longer(self.start_s, start_s)
        self.step_s = _longer(self.step_s, step_s)
        self.checkpoint_s = _longer(self.checkpoint_s, checkpoint_s)

    def costs(self, trainer: Trainer) -> tuple[float, float]:
        """Assumed seconds of a rescale up and down: stated, measured (or most), or default."""
        start_s, checkpoint_s = self.start_s, self.checkpoint_s
        whole_s = None if start_s is None or checkpoint_s is None else start_s + checkpoint_s

        def cost(way: str, measured_s: float | None, said_s: float) -> float:
            if way in trainer.stated_costs:
                return said_s
            known = [seconds for seconds in (measured_s, whole_s) if seconds is not None]
            return known[0] if known else said_s

        return cost('up', self.up_s, trainer.rescale_up_s), cost(
            'down', self.down_s, trainer.rescale_down_s
        )

    def shortest_s(self, assumed_s: float) -> float:
        """The shortest time to start, train a batch and save; ``assumed_s`` until measured."""
        start_s, step_s, checkpoint_s = self.start_s, self.step_s, self.checkpoint_s
        needed_s = (start_s or 0.0) + (step_s or 0.0) + 2 * (checkpoint_s or 0.0) + FLOOR_S
        measured = None not in (start_s, step_s, checkpoint_s)
        return needed_s if measured else max(needed_s, assumed_s)


def _longer(old: float | None, seconds: float | None) -> float | None:
    if seconds is None or not 0 < seconds < math.inf:
        return old
    return seconds if old is None else max(seconds, old + SMOOTHING * (seconds - old))
