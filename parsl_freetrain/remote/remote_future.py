"""The future of a trainer that trains at an endpoint."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, TrainerFailed
from parsl_freetrain.executor.globus.protocol import (
    BAD_INPUT,
    CANCELLED,
    OK,
    Answer,
    Order,
    TrainerStatus,
)
from parsl_freetrain.executor.trainer.future import Progress, TrainingFuture
from parsl_freetrain.host.backoff import Backoff


class RemoteTraining(TrainingFuture):
    """The final :class:`~parsl_freetrain.core.model.types.Checkpoint` of a trainer at an endpoint.
    The checkpoint's path is a path at the endpoint.

    Made by :class:`~parsl_freetrain.remote.FreeTrainClient`. Differs from
    :class:`~parsl_freetrain.executor.trainer.future.TrainingFuture`: ``checkpoints`` stays empty,
    and ``state`` can also be 'sent' (the endpoint has not answered yet) and 'unreachable' (the
    endpoint cannot be asked; the trainer may still be running).

    Parameters
    ----------
    order, payload
        The order to send, and to send again where necessary.
    ask
        Requests the trainer's status from the endpoint; takes the maximum number of seconds to
        wait.
    """

    def __init__(
        self,
        order: Order,
        payload: str,
        ask: Callable[[RemoteTraining, float], None],
        backoff: Backoff,
    ) -> None:
        super().__init__(order.trainer)
        self.state = 'sent'
        self.order = order
        self.payload = payload
        self.cancelling = False
        self.backoff = backoff  # between attempts to reach the endpoint
        self.unseen = 0  # consecutive status requests that did not find the trainer
        self.due: float | None = None  # when to send again, by the client's clock
        self._ask = ask
        self._settling = threading.Lock()

    def left(self, where: str) -> None:
        """Its client was closed; ``where`` names the endpoint."""
        self.fail(
            TrainerFailed(
                f'Trainer {self.name!r} is not followed any more, because its FreeTrainClient was '
                f'closed; it goes on at {where}: attach({self.name!r}) follows it again.'
            )
        )

    def progress(self, timeout_s: float = 30.0) -> Progress:
        """Progress as the endpoint reports it, or the last known progress if the endpoint does not
        answer within ``timeout_s`` seconds.
        """
        if not self.done() and timeout_s > 0:
            with contextlib.suppress(FutureTimeout, CancelledError):
                self._ask(self, timeout_s)
        return self._progress

    def shown(self, found: TrainerStatus) -> None:
        """Take in the endpoint's status of the trainer."""
        if self.done():
            return
        self.state, self._progress = found.state, found.progress
        if found.checkpoint is not None:
            self.checkpoint = found.checkpoint

    def settle(self, reply: Answer) -> None:
        """Settle the future with how the trainer ended at the endpoint; a second end changes
        nothing.
        """
        if reply.kind == OK and reply.checkpoint is not None:
            self.checkpoint = checkpoint = reply.checkpoint
            self.end('finished', lambda: self.set_result(checkpoint))
        elif reply.kind == CANCELLED:
            self.end('cancelled', self._settle_cancelled)
        else:
            said = reply.sentence or f'The endpoint answered {reply.kind!r} without a checkpoint.'
            self.fail((BadInput if reply.kind == BAD_INPUT else TrainerFailed)(said))

    def fail(self, error: FreeTrainError) -> None:
        self.end('failed', lambda: self.set_exception(error))

    def end(self, state: str, settle: Callable[[], None]) -> None:
        """Settle the future, unless it is settled already. Can be called from any thread."""
        with self._settling:
            if not self.done():
                self.state = state
                with contextlib.suppress(InvalidStateError):
                    settle()
