"""Notices that this rank waits in an exchange too long, or for a rank that is gone. gloo may not
end an exchange whose connection breaks in the middle: only this process's end does.
"""

import faulthandler
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parsl_freetrain.training.spec.messages import Stuck

LEAST_S = 15.0  # minimum seconds in one exchange that count as too long
STEPS = 10  # the same, in steps
LOOK_S = 1.0  # seconds between two looks


class ExchangeWatch:
    def __init__(self) -> None:
        self._now: tuple[str, float] | None = None
        self._aside = False
        self._steps_s: deque[float] = deque(maxlen=8)

    @contextmanager
    def exchange(self, name: str) -> Iterator[None]:
        before = self._now
        self._now = before or (name, time.monotonic())
        try:
            yield
        finally:
            self._now = before

    @contextmanager
    def not_followed(self) -> Iterator[None]:
        """Exchanges that may take longer than many steps: a whole state is sent."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def step_took(self, seconds: float) -> None:
        """Before the first step nothing counts as too long."""
        self._steps_s.append(seconds)

    def watch(
        self,
        rank: int,
        send: Callable[[Stuck], object],
        broken: Callable[[], bool],
        end: Callable[[str], object],
    ) -> None:
        """In a thread: send what is found; ``end`` this process if an exchange is ``broken``."""
        seen = shown = without_peer = None
        while True:
            time.sleep(LOOK_S)
            seen, now = self._now, seen
            if now is None or now is not seen or self._aside:
                continue
            if broken():
                if now is without_peer:
                    end(now[0])
                without_peer = now
            if not self._steps_s:
                continue
            waited_s = time.monotonic() - now[1]
            if waited_s < max(LEAST_S, STEPS * max(self._steps_s)):
                continue
            if now is not shown:
                print(f'This rank has waited in {now[0]} for {waited_s:.0f} s:', file=sys.stderr)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                shown = now
            send(Stuck(rank, now[0]))


exchanges = ExchangeWatch()  # those of this process
