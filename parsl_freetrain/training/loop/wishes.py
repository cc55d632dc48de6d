"""What this rank wishes to happen after a step, and what it tells the node agent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from parsl_freetrain.core.model.events import FragmentProgressed
from parsl_freetrain.training.comm.peers import Agreed, Agreement
from parsl_freetrain.training.loop.loop_state import LoopState
from parsl_freetrain.training.loop.rank_parts import Model, RankParts
from parsl_freetrain.training.loop.rollback import Rollback

PROGRESS_EVERY_S = 0.5
BUSY_EVERY_S = 10.0  # during an evaluation, which makes no progress


class EvaluationStopped(BaseException):
    """Ends an evaluation, since the fragment has to stop."""


class Wishes:
    """One rank's wishes, on which all agree; ``near_end``: the next step may be an epoch's last."""

    def __init__(
        self, parts: RankParts, model: Model, state: LoopState, rollback: Rollback
    ) -> None:
        self._peers, self._channel, self._inbox = parts.peers, parts.channel, parts.inbox
        self._checkpointer, self._is_main = parts.checkpointer, parts.place.rank == 0
        self._steps, self._state, self._rollback = model.steps, state, rollback
        self._key = parts.order.key
        self._reported_at = 0.0
        self.near_end, self.steps_left, self.rate = False, math.inf, 0.0

    def after_step(self) -> Agreed:
        if self._rollback.spoilt_meanwhile():
            return Agreed.SPOILT
        if self._state.finishing:
            return Agreed.FINISH
        if self._stops(1 + self._steps.delay):
            return Agreed.STOP
        if not self._is_main:
            return Agreed.GO_ON
        if self._checkpointer.wants_to_save(near_end=self.near_end, steps_left=self.steps_left):
            return Agreed.SAVE
        due = time.monotonic() - self._reported_at >= PROGRESS_EVERY_S
        return Agreed.REPORT if due else Agreed.GO_ON

    def in_evaluation(self) -> Callable[[], None]:
        """To be called after each batch, equally often on all ranks; raises EvaluationStopped."""
        agreement = Agreement(self._peers)

        def look() -> None:
            if time.monotonic() - self._reported_at >= BUSY_EVERY_S:
                self.report(wait=False)
            decision = agreement.after_step(
                lambda: Agreed.STOP if self._stops(1) else Agreed.GO_ON,
                self._checkpointer.timing.time_left,
            )
            if decision == Agreed.STOP:
                raise EvaluationStopped

        return look

    def report(self, *, wait: bool) -> None:
        """Tell the node agent how far training is, which does not wait for it without ``wait``."""
        self._reported_at = time.monotonic()
        if self._is_main:
            state = self._state
            self._channel.send(
                FragmentProgressed(
                    time.time(), *self._key, state.samples, self.rate, state.metrics
                ),
                wait=wait,
            )

    def _stops(self, steps_ahead: int) -> bool:
        stop, timing = self._inbox.stop_requested(), self._checkpointer.timing
        timing.deadline = min(timing.deadline, self._inbox.deadline)
        return stop or (self._is_main and self._checkpointer.must_stop(steps_ahead))
