"""The rescale costs that decisions assumed, in seconds, learned from a trainer's fragments."""

from __future__ import annotations

from parsl_freetrain.core.controller.overheads import Measured
from parsl_freetrain.core.model.events import FragmentEnded, Rescaled
from parsl_freetrain.core.model.types import Trainer


class Costs:
    """Learns what a trainer's rescales cost as the controller does, event by event."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._measured = Measured()

    def observe(self, event: Rescaled | FragmentEnded) -> None:
        if isinstance(event, Rescaled):
            self._measured.rescaled(up=event.after > event.before, seconds=event.seconds)
        else:
            self._measured.timed(event.start_s, event.step_s, event.checkpoint_s)

    def of(self, before: int, after: int) -> float:
        """The assumed cost of this change, in seconds at the rate before it."""
        up_s, down_s = self._measured.costs(self._trainer)
        return 0.0 if before == after else up_s if after > before else down_s
