"""Agreement of all ranks on what to do next, several times a second: it keeps short steps fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from time import monotonic

from parsl_freetrain.training.comm.peers import Peers

EVERY_S = 0.25
_CAREFUL = 40


class Agreed(IntEnum):
    """What is done after a step. Each takes precedence over those before it."""

    GO_ON = 0
    REPORT = 1
    SAVE = 2
    STOP = 3
    FINISH = 4
    SPOILT = 5
    """The state has numbers that are not finite."""
    DIFFERENT = 6
    """The ranks do not do the same."""


def steps_between(step_s: float, time_left_s: float = math.inf) -> int:
    """Steps from one agreement to the next: as many as fit into :data:`EVERY_S`, at least 1.
    Towards the end (``time_left_s``) there are fewer, since steps may suddenly become slow.
    """
    every_s = min(EVERY_S, max(time_left_s, 0.0) / _CAREFUL)
    return max(1, int(every_s / step_s)) if step_s > 0 else 1


class Agreement:
    """Finds the maximum of all ranks' wishes while training continues: the ranks ask after one step
    and read the answer after the next. All must call :meth:`after_step` equally often. They also
    agree on the steps to the next agreement, the fewest that a rank asks for. ``same`` gives a
    number that must be the same on all ranks; otherwise they are :attr:`Agreed.DIFFERENT`.
    """

    def __init__(
        self,
        peers: Peers,
        clock: Callable[[], float] = monotonic,
        same: Callable[[], int] = lambda: 0,
    ) -> None:
        self._peers, self._clock, self._same = peers, clock, same
        self._answer: Callable[[], tuple[int, ...]] | None = None
        self._between = 1
        self._steps = 0
        self._since = clock()

    @property
    def delay(self) -> int:
        """Maximum number of steps from a wish to the decision."""
        return 0 if self._peers.world_size == 1 else self._between + 1

    def after_step(self, wish: Callable[[], int], time_left: Callable[[], float]) -> int:
        """The decision that is due now, or :attr:`Agreed.GO_ON`. ``wish`` and ``time_left``
        (seconds) are called only when an agreement begins.
        """
        if self._peers.world_size == 1:
            return wish()
        self._steps += 1
        if self._answer is not None:
            decision, fewest, largest, smallest = self._answer()
            self._answer = None
            self._between = -fewest
            return decision if largest == -smallest else Agreed.DIFFERENT
        if self._steps >= self._between:
            now = self._clock()
            between = steps_between((now - self._since) / self._steps, time_left())
            same = self._same()
            self._answer = self._peers.all_reduce_max((wish(), -between, same, -same))
            self._steps, self._since = 0, now
        return Agreed.GO_ON
