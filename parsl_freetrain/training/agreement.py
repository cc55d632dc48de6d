"""When the ranks agree on what to do next: not at every step, which short steps would feel, but several times a second."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

from parsl_freetrain.training.peers import Peers

# In the order in which one takes precedence over those before it.
GO_ON, SAVE, STOP, SPOILT = range(4)
EVERY_S = 0.25


_CAREFUL = 40


def steps_between(step_s: float, time_left_s: float = math.inf) -> int:
    """Steps from one agreement to the next, where a step takes ``step_s`` seconds: as many as fit into :data:`EVERY_S`, at least 1.

    Fewer where the nodes go in ``time_left_s`` seconds: steps may become slow all of a sudden, and there must be time left then.
    """
    every_s = min(EVERY_S, max(time_left_s, 0.0) / _CAREFUL)
    return max(1, int(every_s / step_s)) if step_s > 0 else 1


class Agreement:
    """Finds the largest of all ranks' wishes, beside training: asked after one step, answered after the next.

    All ranks must call :meth:`after_step` the same number of times. How many steps lie between two agreements is itself agreed on, as the
    fewest that a rank asks for, so that all ranks count alike.
    """

    def __init__(self, peers: Peers, clock: Callable[[], float] = monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self._answer: Callable[[], tuple[int, ...]] | None = None
        self._between = 1
        self._steps = 0
        self._since = clock()

    @property
    def delay(self) -> int:
        """So many steps may pass from a wish to the decision."""
        return 0 if self._peers.world_size == 1 else self._between + 1

    def after_step(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int:
        """The decision that is due now, or :data:`GO_ON`; ``wish`` and ``time_left`` (seconds) are called when this rank is asked."""
        if self._peers.world_size == 1:
            return wish()
        self._steps += 1
        if self._answer is not None:
            decision, fewest = self._answer()
            self._answer = None
            self._between = -fewest
            return decision
        if self._steps >= self._between:
            now = self._clock()
            between = steps_between((now - self._since) / self._steps, time_left())
            self._answer = self._peers.largest((wish(), -between))
            self._steps, self._since = 0, now
        return GO_ON
