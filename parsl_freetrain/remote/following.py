"""Follows trainers at an endpoint: sends their orders until they have arrived, and again where they
were lost; asks how the trainers are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from msgspec import structs

from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.executor.globus.protocol import (
    CANCEL,
    CANCELLED,
    INTERRUPTED,
    LOOK,
    UNKNOWN,
    Answer,
    Order,
    TrainerStatus,
)
from parsl_freetrain.host.backoff import Backoff
from parsl_freetrain.remote.endpoint_connection import Connection
from parsl_freetrain.remote.remote_future import RemoteTraining

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 300.0


class Follower:
    """Follows trainers, one of each name, with a thread of its own.

    Parameters
    ----------
    look_every_s, first_backoff_s
        As :class:`~parsl_freetrain.remote.FreeTrainClient` takes them.
    clock
        Seconds, ever increasing.
    """

    def __init__(
        self,
        connection: Connection,
        look_every_s: float,
        first_backoff_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._look_every_s = look_every_s
        self._first_backoff_s = first_backoff_s
        self._clock = clock
        self._open: dict[str, RemoteTraining] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def trainings(self) -> list[RemoteTraining]:
        """Those that have not ended."""
        with self._lock:
            return list(self._open.values())

    def follow(self, order: Order, payload: str = '') -> RemoteTraining:
        """Send an order and follow its trainer until that ends. Raises BadInput if this follower is
        closed, or follows a trainer of this name already.
        """
        training = RemoteTraining(
            order, payload, self._ask, Backoff(self._first_backoff_s, LONGEST_BACKOFF_S)
        )
        training._on_cancel = lambda: self._cancel(training)
        with self._lock:
            if self._closed:
                raise BadInput(
                    f'Trainer {training.name!r} cannot be sent: this FreeTrainClient is closed.'
                )
            if training.name in self._open:
                raise BadInput(
                    f'Trainer {training.name!r} is followed by this client already; give '
                    'each training a trainer_name.'
                )
            self._open[training.name] = training
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep, name='FreeTrain-Client', daemon=True
                )
                self._thread.start()
        training.add_done_callback(lambda _: self._open.pop(training.name, None))
        self._send(training)
        return training

    def _send(self, training: RemoteTraining) -> None:
        """Send a trainer's order, which is answered when the trainer ends. An order sent again
        finds the trainer that the first one started.
        """
        training.due = None
        self._ordered(
            training, training.order, training.payload, lambda reply: self._ended(training, reply)
        )

    def _cancel(self, training: RemoteTraining) -> None:
        training.cancelling = True
        training.due = None

        def cancelled(reply: Answer) -> None:
            if reply.kind == UNKNOWN:  # not started, or ended and its answer is coming
                training.settle(Answer(CANCELLED))

        self._ordered(training, Order(CANCEL, training.name), '', cancelled)

    def _ordered(
        self, training: RemoteTraining, order: Order, payload: str, then: Callable[[Answer], None]
    ) -> None:
        def answered(done: Future[Answer]) -> None:
            try:
                reply = done.result()
            except (Exception, CancelledError) as error:
                self._not_arrived(training, error)
            else:
                training.backoff.reset()
                then(reply)

        try:
            sent = self._connection.send(order, payload)
        except Exception as error:
            self._not_arrived(training, error)
        else:
            sent.add_done_callback(answered)

    def _not_arrived(self, training: RemoteTraining, error: BaseException) -> None:
        if training.done() or self._closed:
            return
        refusal = self._connection.refusal(error)
        if refusal is not None:
            refusal.__cause__ = error
            training.fail(refusal)
            return
        logger.warning(
            'Trainer %s: %s could not be asked: %s: %s',
            training.name,
            self._connection.name,
            type(error).__name__,
            error,
        )
        training.state = 'unreachable'
        self._later(training)

    def _later(self, training: RemoteTraining) -> None:
        training.due = self._clock() + training.backoff.failed()
        self._wake.set()

    def _ended(self, training: RemoteTraining, reply: Answer) -> None:
        if training.done():
            return
        if reply.kind == INTERRUPTED and training.payload:
            self._again(training)
        elif reply.kind == UNKNOWN:
            training.fail(BadInput(reply.sentence))
        else:
            training.settle(reply)

    def _again(self, training: RemoteTraining) -> None:
        """The endpoint's process has ended or restarted: send the trainer to the next process,
        where it continues from its checkpoints.
        """
        training.order = structs.replace(training.order, again=True)
        training.state, training.unseen = 'sent', 0
        self._later(training)

    def _keep(self) -> None:
        next_look = self._clock() + self._look_every_s
        while not self._closed:
            trainings = self.trainings()
            dues = [t.due for t in trainings if t.due is not None]
            self._wake.wait(max(0.0, min([next_look, *dues]) - self._clock()))
            self._wake.clear()
            now = self._clock()
            for training in trainings:
                if (
                    training.due is not None
                    and training.due <= now
                    and not training.done()
                    and not self._closed
                ):
                    (self._cancel if training.cancelling else self._send)(training)
            if now >= next_look:
                next_look = now + self._look_every_s
                if trainings and not self._closed:
                    self._look()

    def _look(self) -> None:
        def looked(done: Future[Answer]) -> None:
            try:
                found = done.result().trainers
            except (Exception, CancelledError):
                logger.warning(
                    '%s could not be asked how its trainers are',
                    self._connection.name,
                    exc_info=True,
                )
                return
            for training in trainings:
                self._seen(training, found.get(training.name))

        trainings = self.trainings()
        try:
            self._connection.send(Order(LOOK), '').add_done_callback(looked)
        except Exception:
            logger.warning(
                '%s could not be asked how its trainers are', self._connection.name, exc_info=True
            )

    def _seen(self, training: RemoteTraining, found: TrainerStatus | None) -> None:
        """Take in the endpoint's status of a trainer. None: the endpoint's process does not know
        it, so it is not the process that the trainer was sent to.
        """
        if found is not None and training.order.request in ('', found.request):
            training.unseen = 0
            training.shown(found)
        elif training.payload and training.due is None and not training.done():
            training.unseen += 1  # once may mean that the request has overtaken the order
            if training.unseen > 1:
                logger.warning(
                    'Trainer %s is unknown to %s: sending it again',
                    training.name,
                    self._connection.name,
                )
                self._again(training)

    def _ask(self, training: RemoteTraining, timeout_s: float) -> None:
        try:
            reply = self._connection.send(Order(LOOK, training.name), '').result(timeout_s)
        except Exception:
            logger.warning(
                '%s could not be asked about trainer %s',
                self._connection.name,
                training.name,
                exc_info=True,
            )
            return
        self._seen(training, reply.trainers.get(training.name))

    def close(self) -> None:
        """Stop following. Futures that are open raise an error that says how to find their trainers
        again.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        left = self.trainings()
        self._wake.set()
        if thread is not None:
            thread.join()
        self._connection.close()
        for training in left:
            training.left(self._connection.name)
