"""FreeTrainClient: submit trainers from a laptop, follow them, and find them again."""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from types import TracebackType
from typing import Any

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.errors import BadInput, TrainerFailed
from parsl_freetrain.executor.future import Progress
from parsl_freetrain.executor.orders import (
    CANCEL,
    INTERRUPTED,
    LOOK,
    OK,
    TRAIN,
    UNKNOWN,
    VERSIONS,
    WAIT,
    Answer,
    Comparison,
    Order,
    compare,
    describe,
    versions_here,
)
from parsl_freetrain.executor.payload import pack
from parsl_freetrain.executor.requirements import modules_needed
from parsl_freetrain.executor.trainer_settings import check_name
from parsl_freetrain.remote.connection import LARGEST_PAYLOAD, Connection
from parsl_freetrain.remote.training import RemoteTraining

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 2.0, 300.0


class FreeTrainClient:
    """Trains at a Globus Compute endpoint with FreeTrainEngine.

    Trainings go on at the endpoint whatever becomes of the client. While it lives, the client looks after them: what was lost on the
    way, because this computer slept or the endpoint's process was started anew, is sent again, and continues from its checkpoints.

    Parameters
    ----------
    endpoint_id
        The endpoint's id.
    user_endpoint_config
        Options for the endpoint's template: account, queue and so on.
    executor
        In place of these, a :class:`globus_compute_sdk.Executor` or a Parsl GlobusComputeExecutor that nothing else uses.
    look_every_s
        Seconds between two looks at the trainings.
    first_backoff_s
        Seconds until what did not arrive is sent again; twice as long each time, up to five minutes.

    Raises
    ------
    BadInput
        If not one of ``endpoint_id`` and ``executor`` is given, or the Globus Compute SDK is not installed.
    """

    def __init__(self, endpoint_id: str | None = None, *, user_endpoint_config: Mapping[str, Any] | None = None, executor: Any = None,
                 look_every_s: float = 60.0, first_backoff_s: float = FIRST_BACKOFF_S,
                 clock: Callable[[], float] = time.monotonic) -> None:
        if (endpoint_id is None) == (executor is None):
            raise BadInput('FreeTrainClient needs an endpoint_id, or an executor that knows its endpoint; give one of them.')
        self._connection = Connection(endpoint_id, user_endpoint_config, executor)
        self._look_every_s = look_every_s
        self._first_backoff_s = first_backoff_s
        self._clock = clock
        self._open: dict[str, RemoteTraining] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._keeper: threading.Thread | None = None

    def submit(self, app: FreeTrainApp, *args: Any, trainer_name: str | None = None, **kwargs: Any) -> RemoteTraining:
        """Start a trainer at the endpoint.

        Parameters
        ----------
        app
            A function under ``@freetrain_app``.
        *args, **kwargs
            What it takes behind its fragment context: plain data, paths of the endpoint's file system. Not futures.
        trainer_name
            Names the trainer and its checkpoint folder; default: the app's name. The same name continues from its checkpoints.

        Raises
        ------
        BadInput
            If the trainer can never run, as far as this computer can tell; what the endpoint finds wrong is raised by the future.
        """
        name = app.name if trainer_name is None else trainer_name
        check_name(name)
        if any(isinstance(value, Future) for value in (*args, *kwargs.values())):
            raise BadInput(f'Trainer {name!r} cannot be sent: one of its arguments is a future; give its result().')
        payload = pack(app.function, args, kwargs, name)
        if len(payload) > LARGEST_PAYLOAD:
            raise BadInput(f'Trainer {name!r} cannot be sent: its function and arguments have {len(payload)} bytes, and Globus Compute '
                           f'takes {LARGEST_PAYLOAD}; put data into files at the endpoint, and pass their paths.')
        settings = app.settings
        order = Order(TRAIN, name, secrets.token_hex(8), versions=versions_here(), modules=modules_needed(app.function, payload),
                      description=describe(settings.trainer(name), settings.terms(''), app.identity(), settings.resume))
        return self._follow(RemoteTraining(order, base64.b64encode(payload).decode(), self._ask))

    def attach(self, name: str) -> RemoteTraining:
        """Follow a trainer that was submitted before, from this computer or another one.

        The future raises BadInput if the endpoint's process does not know it; submit it again then, and it continues.
        """
        return self._follow(RemoteTraining(Order(WAIT, name), '', self._ask))

    def trainers(self, timeout_s: float = 60.0) -> dict[str, tuple[str, Progress]]:
        """State and progress of all trainers that were submitted since the endpoint's process has started.

        Raises
        ------
        BadInput
            If the endpoint does not run FreeTrainEngine.
        TimeoutError
            If it does not answer in time.
        """
        found = self._answered(Order(LOOK), timeout_s)['trainers']
        return {name: (known['state'], Progress(**known['progress'])) for name, known in found.items()}

    def compare_versions(self, timeout_s: float = 60.0) -> tuple[Comparison, ...]:
        """Versions here and at the endpoint; raises as :meth:`trainers` does."""
        return compare(versions_here(), self._answered(Order(VERSIONS), timeout_s)['versions'])

    def _answered(self, order: Order, timeout_s: float) -> Answer:
        try:
            reply = self._connection.send(order, '').result(timeout_s)
        except TimeoutError:
            raise TimeoutError(f'{self._connection.name} did not answer within {timeout_s:g} s; it may not be running.') from None
        except Exception as error:
            raise self._connection.refusal(error) or error from error
        if reply['kind'] != OK:
            raise BadInput(reply['sentence'])
        return reply

    def _follow(self, training: RemoteTraining) -> RemoteTraining:
        training._on_cancel = lambda: self._cancel(training)
        with self._lock:
            if self._closed:
                raise BadInput(f'Trainer {training.name!r} cannot be sent: this FreeTrainClient is closed.')
            if training.name in self._open:
                raise BadInput(f'Trainer {training.name!r} is followed by this client already; give each training a trainer_name.')
            self._open[training.name] = training
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._keep, name='FreeTrain-Client', daemon=True)
                self._keeper.start()
        training.add_done_callback(lambda _: self._open.pop(training.name, None))
        self._send(training)
        return training

    def _send(self, training: RemoteTraining) -> None:
        """Send a training's order, which is answered when it ends; sent again, it finds the trainer that it has started."""
        training.due = None
        self._ordered(training, training.order, training.payload, lambda reply: self._ended(training, reply))

    def _cancel(self, training: RemoteTraining) -> None:
        training.cancelling = True
        training.due = None

        def cancelled(reply: Answer) -> None:
            if reply['kind'] == UNKNOWN:    # nothing has begun, or it is over, and the answer comes
                training.settle({'kind': 'cancelled'})

        self._ordered(training, Order(CANCEL, training.name), '', cancelled)

    def _ordered(self, training: RemoteTraining, order: Order, payload: str, then: Callable[[Answer], None]) -> None:
        def answered(done: Future[Answer]) -> None:
            try:
                reply = done.result()
            except (Exception, CancelledError) as error:
                self._not_arrived(training, error)
            else:
                training.tries = 0
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
        logger.warning('Trainer %s: %s could not be asked: %s: %s', training.name, self._connection.name, type(error).__name__, error)
        training.state = 'unreachable'
        self._later(training)

    def _later(self, training: RemoteTraining) -> None:
        training.due = self._clock() + min(self._first_backoff_s * 2 ** min(training.tries, 20), LONGEST_BACKOFF_S)
        training.tries += 1
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
        """The endpoint's process has ended or begun anew: send the trainer to the one that follows, to go on from its checkpoints."""
        training.order = replace(training.order, again=True)
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
                if training.due is not None and training.due <= now and not training.done() and not self._closed:
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
                logger.warning('%s could not be asked how its trainers are', self._connection.name, exc_info=True)
                return
            for training in trainings:
                self._seen(training, found.get(training.name))

        with self._lock:
            trainings = list(self._open.values())
        try:
            self._connection.send(Order(LOOK), '').add_done_callback(looked)
        except Exception:
            logger.warning('%s could not be asked how its trainers are', self._connection.name, exc_info=True)

    def _seen(self, training: RemoteTraining, found: Mapping[str, Any] | None) -> None:
        """The endpoint has said how a trainer is; None: it does not know it, so that its process is not the one that was asked to train."""
        if found is not None and training.order.request in ('', found['request']):
            training.unseen = 0
            training.shown(found)
        elif training.payload and training.due is None and not training.done():
            training.unseen += 1    # once may mean that the look has overtaken the order
            if training.unseen > 1:
                logger.warning('Trainer %s is unknown to %s: sending it again', training.name, self._connection.name)
                self._again(training)

    def _ask(self, training: RemoteTraining, timeout_s: float) -> None:
        try:
            reply = self._connection.send(Order(LOOK, training.name), '').result(timeout_s)
        except Exception:
            logger.warning('%s could not be asked about trainer %s', self._connection.name, training.name, exc_info=True)
            return
        self._seen(training, reply['trainers'].get(training.name))

    def close(self) -> None:
        """Stop following. Trainings go on at the endpoint; their futures here raise a sentence that says how to find them again."""
        with self._lock:
            self._closed = True
            left, keeper = list(self._open.values()), self._keeper
        self._wake.set()
        if keeper is not None:
            keeper.join()
        self._connection.close()
        for training in left:
            training.fail(TrainerFailed(f'Trainer {training.name!r} is not followed any more, because its FreeTrainClient was closed; '
                                        f'it goes on at {self._connection.name}: attach({training.name!r}) follows it again.'))

    def __enter__(self) -> FreeTrainClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
