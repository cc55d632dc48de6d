"""Messages to a running rank: from the node agent, and signals from the scheduler."""

import math
import signal
import threading
import time

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec import messages as ms

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
GOES, MAY_STAY, STAYS = range(3)  # a rank's node: taken away; unknown; the trainer stays there


class Inbox:
    """Reads the channel between steps; ``deadline``: by monotonic time, as far as heard."""

    def __init__(self, channel: Channel[ms.ToRank]) -> None:
        self._channel = channel
        self._stop = self._listening = False
        self._goes = self._stays = self._followed = False
        self._rendezvous: ms.Rendezvous | None = None
        self.deadline = math.inf

    def listen_to_signals(self) -> None:
        """Treat :data:`STOP_SIGNALS` as requests to stop, also if they were blocked until now."""
        self._listening = True
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def stop_requested(self) -> bool:
        here = threading.current_thread() is threading.main_thread()
        if self._listening and here and not self._stop:
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != self._on_signal:  # the user's own, or a library's
                    print(f'A handler of {number.name} was replaced: ctx hears notices itself.')
                    signal.signal(number, self._on_signal)
        while not self._stop and self._look():
            pass
        return self._stop

    def standing(self) -> int:
        """:data:`GOES`, :data:`MAY_STAY` or :data:`STAYS`, without waiting."""
        while self._look():
            pass
        return GOES if self._goes else STAYS if self._stays else MAY_STAY

    def followed(self) -> bool:
        """Whether the next fragment is ready, and this node stays; without waiting."""
        return self.standing() != GOES and self._followed

    def wait_for_rendezvous(self, timeout_s: float) -> ms.Rendezvous:
        """Raises FreeTrainError after ``timeout_s`` seconds, EOFError if the node agent is gone."""
        deadline = time.monotonic() + timeout_s
        while self._rendezvous is None:
            if not self._channel.poll(max(deadline - time.monotonic(), 0.0)):
                raise FreeTrainError(
                    f'This rank has not heard within {timeout_s:g} s where to meet rank 0.'
                )
            self._take(self._channel.recv())
        return self._rendezvous

    def _look(self) -> bool:
        if not self._channel.poll():
            return False
        try:
            self._take(self._channel.recv())
        except EOFError:
            return False  # the node agent is gone; the fork server sees it too, and ends this rank
        return True

    def _take(self, message: ms.ToRank | None) -> None:
        match message:
            case ms.StopTraining():
                self._stop = True
                self._goes = self._goes or message.node_leaves
                self._followed = message.followed
            case ms.NodeEnds(deadline):
                self.deadline = deadline
            case ms.NodeStays():
                self._stays = True
            case ms.Rendezvous():
                self._rendezvous = message

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = self._goes = True
