"""FreeTrainClient: submit trainers from a laptop, follow them, and find them again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import Any

from msgspec import structs

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.globus.protocol import (
    CANCEL,
    INTERRUPTED,
    LOOK,
    OK,
    UNKNOWN,
    VERSIONS,
    WAIT,
    Answer,
    Comparison,
    Order,
    compare,
    versions_here,
)
from parsl_freetrain.executor.trainer.future import Progress
from parsl_freetrain.host.backoff import Backoff
from parsl_freetrain.remote.connection import Connection
from parsl_freetrain.remote.sending import order_of
from parsl_freetrain.remote.training import RemoteTraining

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 300.0


class FreeTrainClient(Executor):
    """Submits trainers to a Globus Compute endpoint with FreeTrainEngine.

    A :class:`concurrent.futures.Executor`, except that leaving a ``with`` block does not wait for
    trainers, which may take days: see :meth:`close` and :meth:`shutdown`.

    Trainers keep running at the endpoint when the client ends. While the client runs, it resubmits
    trainers that were lost because this computer slept or the endpoint's process was restarted;
    they continue from their checkpoints.

    Parameters
    ----------
    endpoint_id
        The endpoint's id.
    user_endpoint_config
        Options for the endpoint's template: account, queue and so on.
    executor
        A :class:`globus_compute_sdk.Executor` or a Parsl GlobusComputeExecutor to use in place of
        ``endpoint_id`` and ``user_endpoint_config``. Nothing else may use it.
    look_every_s
        Seconds between two status requests.
    first_backoff_s
        Seconds before the first retry of a message that did not arrive; doubled at each retry, up
        to five minutes.

    Raises
    ------
    BadInput
        Unless exactly one of ``endpoint_id`` and ``executor`` is given, or if the Globus Compute
        SDK is not installed.
    """

    def __init__(
        self,
        endpoint_id: str | None = None,
        *,
        user_endpoint_config: Mapping[str, Any] | None = None,
        executor: Any = None,
        look_every_s: float = 60.0,
        first_backoff_s: float = FIRST_BACKOFF_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (endpoint_id is None) == (executor is None):
            raise BadInput(
                'FreeTrainClient needs an endpoint_id, or an executor that knows its '
                'endpoint; give one of them.'
            )
        self._connection = Connection(endpoint_id, user_endpoint_config, executor)
        self._look_every_s = look_every_s
        self._first_backoff_s = first_backoff_s
        self._clock = clock
        self._open: dict[str, RemoteTraining] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._keeper: threading.Thread | None = None

    def submit(  # type: ignore[override]  # it takes trainers only
        self, app: FreeTrainApp, /, *args: Any, trainer_name: str | None = None, **kwargs: Any
    ) -> RemoteTraining:
        """Start a trainer at the endpoint.

        Parameters
        ----------
        app
            A function decorated with ``@freetrain_app``.
        *args, **kwargs
            Arguments of the function after its fragment context: plain data, and paths on the
            endpoint's file system. No futures.
        trainer_name
            Name of the trainer and of its checkpoint folder; default: the app's name. A trainer of
            the same name continues from its checkpoints.

        Raises
        ------
        BadInput
            If this computer can tell that the trainer can never run. Errors found at the endpoint
            are set on the future.
        """
        order, payload = order_of(app, args, kwargs, trainer_name)
        return self._follow(RemoteTraining(order, payload, self._ask, self._backoff()))

    def map(  # type: ignore[override]
        self,
        app: FreeTrainApp,
        /,
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[Checkpoint]:
        """Start a trainer for each of the arguments, all at once, and iterate over their results in
        order. Their names are the app's, with ``-0``, ``-1``, ...

        ``timeout`` is in seconds from this call; ``chunksize`` has no effect.
        """
        until = None if timeout is None else time.monotonic() + timeout
        trainings = [
            self.submit(app, *args, trainer_name=f'{getattr(app, "name", "trainer")}-{number}')
            for number, args in enumerate(zip(*iterables, strict=False))
        ]
        return (
            one.result(None if until is None else max(0.0, until - time.monotonic()))
            for one in trainings
        )

    def attach(self, name: str) -> RemoteTraining:
        """Follow a trainer that was submitted before, from this computer or another one.

        The future raises BadInput if the endpoint's process does not know the trainer. Submit it
        again then; it continues from its checkpoints.
        """
        return self._follow(RemoteTraining(Order(WAIT, name), '', self._ask, self._backoff()))

    def trainers(self, timeout_s: float = 60.0) -> dict[str, tuple[str, Progress]]:
        """State and progress of all trainers submitted since the endpoint's process started.

        Raises
        ------
        BadInput
            If the endpoint does not run FreeTrainEngine.
        TimeoutError
            If the endpoint does not answer in time.
        """
        found = self._answered(Order(LOOK), timeout_s)['trainers']
        return {
            name: (known['state'], Progress(**known['progress'])) for name, known in found.items()
        }

    def compare_versions(self, timeout_s: float = 60.0) -> tuple[Comparison, ...]:
        """Versions here and at the endpoint; raises as :meth:`trainers` does."""
        return compare(versions_here(), self._answered(Order(VERSIONS), timeout_s)['versions'])

    def _answered(self, order: Order, timeout_s: float) -> Answer:
        try:
            reply = self._connection.send(order, '').result(timeout_s)
        except TimeoutError:
            raise TimeoutError(
                f'{self._connection.name} did not answer within {timeout_s:g} s; it may '
                'not be running.'
            ) from None
        except Exception as error:
            raise self._connection.refusal(error) or error from error
        if reply['kind'] != OK:
            raise BadInput(reply['sentence'])
        return reply

    def _follow(self, training: RemoteTraining) -> RemoteTraining:
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
            if self._keeper is None:
                self._keeper = threading.Thread(
                    target=self._keep, name='FreeTrain-Client', daemon=True
                )
                self._keeper.start()
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
            if reply['kind'] == UNKNOWN:  # not started, or ended and its answer is coming
                training.settle({'kind': 'cancelled'})

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

    def _backoff(self) -> Backoff:
        return Backoff(self._first_backoff_s, LONGEST_BACKOFF_S)

    def _later(self, training: RemoteTraining) -> None:
        training.due = self._clock() + training.backoff.failed()
        self._wake.set()

    def _ended(self, training: RemoteTraining, reply: Answer) -> None:
        if training.done():
            return
        if reply['kind'] == INTERRUPTED and training.payload:
            self._again(training)
        elif reply['kind'] == UNKNOWN:
            training.fail(BadInput(reply['sentence']))
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
            with self._lock:
                trainings = list(self._open.values())
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
                found = done.result()['trainers']
            except (Exception, CancelledError):
                logger.warning(
                    '%s could not be asked how its trainers are',
                    self._connection.name,
                    exc_info=True,
                )
                return
            for training in trainings:
                self._seen(training, found.get(training.name))

        with self._lock:
            trainings = list(self._open.values())
        try:
            self._connection.send(Order(LOOK), '').add_done_callback(looked)
        except Exception:
            logger.warning(
                '%s could not be asked how its trainers are', self._connection.name, exc_info=True
            )

    def _seen(self, training: RemoteTraining, found: Mapping[str, Any] | None) -> None:
        """Take in the endpoint's status of a trainer. None: the endpoint's process does not know
        it, so it is not the process that the trainer was sent to.
        """
        if found is not None and training.order.request in ('', found['request']):
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
        self._seen(training, reply['trainers'].get(training.name))

    def close(self) -> None:
        """Stop following. Trainers keep running at the endpoint; their futures here raise an error
        that says how to find them again.
        """
        with self._lock:
            self._closed = True
            left, keeper = list(self._open.values()), self._keeper
        self._wake.set()
        if keeper is not None:
            keeper.join()
        self._connection.close()
        for training in left:
            training.left(self._connection.name)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop following, and before that wait for all trainers, or end them."""
        with self._lock:
            trainings = list(self._open.values())
        if cancel_futures:
            for training in trainings:
                training.cancel()
        if wait:
            wait_for(trainings)
        self.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
