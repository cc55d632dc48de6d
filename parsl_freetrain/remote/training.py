"""The future of a trainer that trains at an endpoint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from parsl_freetrain.core.errors import BadInput, FreeTrainError, TrainerFailed
from parsl_freetrain.executor.future import Progress, TrainingFuture
from parsl_freetrain.executor.orders import Answer, Order, checkpoint_of


class RemoteTraining(TrainingFuture):
    """The final :class:`~parsl_freetrain.core.words.Checkpoint` of a trainer at an endpoint: a handle, whose path is one over there.

    Made by a :class:`~parsl_freetrain.remote.FreeTrainClient`. As :class:`~parsl_freetrain.executor.future.TrainingFuture`, but
    ``checkpoints`` stays empty, and ``state`` can also be 'sent' (the endpoint has not been heard yet) and 'unreachable' (nobody could
    ask it; the trainer may well train on).

    Parameters
    ----------
    order, payload
        What is sent, and sent again where it must be.
    ask
        Asks the endpoint how the trainer is, waiting at most so many seconds for the answer.
    """

    def __init__(self, order: Order, payload: str, ask: Callable[[RemoteTraining, float], None]) -> None:
        super().__init__(order.trainer)
        self.state = 'sent'
        self.order = order
        self.payload = payload
        self.cancelling = False
        self.tries = 0      # to reach the endpoint
        self.unseen = 0     # looks in a row that did not find the trainer
        self.due: float | None = None   # when something is sent again, by the client's clock
        self._ask = ask
        self._settling = threading.Lock()

    def progress(self, timeout_s: float = 30.0) -> Progress:
        """How far the training is, as the endpoint says; what was known last if it does not answer within ``timeout_s`` seconds."""
        if not self.done() and timeout_s > 0:
            with contextlib.suppress(FutureTimeout, CancelledError):
                self._ask(self, timeout_s)
        return self._progress

    def shown(self, found: Mapping[str, Any]) -> None:
        """Take over what the endpoint says of its trainer."""
        if self.done():
            return
        self.state = found['state']
        self._progress = Progress(**found['progress'])
        if found['checkpoint'] is not None:
            self.checkpoint = checkpoint_of(found['checkpoint'])

    def settle(self, reply: Answer) -> None:
        """Take over how the trainer has ended at the endpoint; a second end changes nothing."""
        match reply['kind']:
            case 'ok':
                self.checkpoint = checkpoint = checkpoint_of(reply['checkpoint'])
                self.end('finished', lambda: self.set_result(checkpoint))
            case 'cancelled':
                self.end('cancelled', self._settle_cancelled)
            case 'bad-input':
                self.fail(BadInput(reply['sentence']))
            case _:
                self.fail(TrainerFailed(reply['sentence']))

    def fail(self, error: FreeTrainError) -> None:
        self.end('failed', lambda: self.set_exception(error))

    def end(self, state: str, settle: Callable[[], None]) -> None:
        """Settle the future, unless it is settled; from any thread."""
        with self._settling:
            if not self.done():
                self.state = state
                with contextlib.suppress(InvalidStateError):
                    settle()
