"""What a rank is told while it runs: messages from its member, signals from the scheduler."""

from __future__ import annotations

import signal
import time
from typing import Any

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.training.channel import Channel

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
GOES, MAY_STAY, STAYS = range(3)
"""What a rank knows of its node after the fragment: it is taken away; nothing; the trainer is to go on there."""


class Inbox:
    """Reads the channel at step boundaries only, so that nothing happens to a rank in the middle of a step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._stop = False
        self._goes = self._stays = False
        self._waiting: list[dict[str, Any]] = []

    def listen_to_signals(self) -> None:
        """From now on SIGTERM, SIGUSR1 and SIGINT are requests to stop, also those that were blocked until now."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def stop_requested(self) -> bool:
        """Look, without waiting, whether anybody has asked to stop."""
        while not self._stop and self._look():
            pass
        return self._stop

    def standing(self) -> int:
        """Look, without waiting, what becomes of this rank's node: :data:`GOES`, :data:`MAY_STAY` or :data:`STAYS`."""
        while self._look():
            pass
        return GOES if self._goes else STAYS if self._stays else MAY_STAY

    def wait_for(self, kind: str, timeout_s: float) -> dict[str, Any]:
        """The first message of a kind.

        Raises
        ------
        FreeTrainError
            If none arrives within ``timeout_s`` seconds.
        EOFError
            If the member is gone.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            for message in self._waiting:
                if message.get('kind') == kind:
                    self._waiting.remove(message)
                    return message
            if not self._channel.poll(max(deadline - time.monotonic(), 0.0)):
                raise FreeTrainError(f'This rank was not sent a {kind!r} message within {timeout_s:g} s.')
            self._take(self._channel.recv())

    def _look(self) -> bool:
        """Take in a message, if there is one; whether there was."""
        if not self._channel.poll():
            return False
        try:
            self._take(self._channel.recv())
        except EOFError:
            return False  # nobody is there to ask; the warm parent sees it too, and ends this rank
        return True

    def _take(self, message: dict[str, Any]) -> None:
        if message.get('kind') == 'stop':
            self._stop = True
            self._goes = self._goes or message.get('leaves', False)
        elif message.get('kind') == 'hand-over':
            self._stays = True
        else:
            self._waiting.append(message)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = self._goes = True
