"""FreeTrainClient: submit trainers from a laptop, follow them, and find them again."""

import functools
import itertools
import logging
import queue
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import structs
from parsl.executors.base import ParslExecutor

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError, TrainerFailed, needs
from parsl_freetrain.core.model.types import Progress
from parsl_freetrain.executor.fragment.payload import pack
from parsl_freetrain.executor.run_lock import check_name
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.host.clocks import Backoff
from parsl_freetrain.remote import orders
from parsl_freetrain.training.process import probe

logger = logging.getLogger(__name__)

LARGEST_PAYLOAD = 7_000_000  # bytes; Globus Compute takes at most 10 MB, and base64 adds a third
CANCEL_LOOK_S = 2.0
# Seconds without an answer after which an order counts as lost; doubled each time.
PATIENCE_S, LONGEST_PATIENCE_S = 20.0, 3600.0
# Of globus_sdk, which moves them between modules.
_LOGIN = {'TokenValidationError', 'LocalServerLoginError', 'CommandLineLoginFlowEOFError'}


class RemoteTraining(TrainingFuture):
    """The final :class:`~parsl_freetrain.core.model.types.Checkpoint` of a trainer at an endpoint,
    with a path over there. Made by :class:`~parsl_freetrain.remote.client.FreeTrainClient`.

    ``progress()`` is what the endpoint said last, ``checkpoints`` stays empty, and ``state`` can
    also be 'sent' (the run at the endpoint has not begun it) and 'unreachable' (the endpoint cannot
    be asked; the trainer may still be running).
    """

    def __init__(self, client: 'FreeTrainClient', order: orders.Order) -> None:
        super().__init__(order.trainer)
        self.state = 'sent'
        self._client = client
        self._order, self._first = order, order
        self._cancelling = False
        self._patience = Backoff(PATIENCE_S, LONGEST_PATIENCE_S)
        self._news: queue.SimpleQueue[Future[bytes] | None] = queue.SimpleQueue()
        self._on_cancel = self._cancel

    def follow(self) -> None:
        """Send the order until the trainer has ended: the endpoint knows what it has taken."""
        while not self._ended:
            order = self._order
            if self._cancelling:
                order = structs.replace(order, verb='cancel', payload=b'', hold_s=0.0)
            self._client.send(order).add_done_callback(self._news.put)
            said = self._next(order.hold_s + self._patience.failed())
            if said is not None and (pause_s := self._answered(said, order)):
                self._next(pause_s)

    def _next(self, wait_s: float) -> Future[bytes] | None:
        """The next answer, maybe to an older order; None: none so long, or there is more to say."""
        with suppress(queue.Empty):
            return self._news.get(timeout=wait_s)
        return None

    def _answered(self, said: Future[bytes], order: orders.Order) -> float:
        """Take an answer in; seconds until the order is sent again."""
        every_s = self._client.look_every_s
        with self._lock:
            try:
                answer = orders.decoded(said.result(), orders.OrderAnswer)
                self._seen(answer.trainers.get(self.name))
                self._patience.reset()
                if order.hold_s or order.verb == 'cancel':
                    every_s = 0.0 if order.hold_s else min(every_s, CANCEL_LOOK_S)
            except Exception as error:
                if (refused := self._client.refusal(error)) is not None:
                    self.fail(refused)
                elif not self._ended:
                    self.state = 'unreachable'
                    logger.warning('%s could not be asked: %r', self._client.name, error)
        return 0.0 if self._ended else every_s

    def _seen(self, found: orders.TrainerStatus | None) -> None:
        if found is None or self._order.request not in ('', found.request):
            if self._cancelling:
                self._settle_cancelled()
            elif not self._first.payload:
                raise BadInput(
                    f'The endpoint has no trainer {self.name!r} in {self._order.checkpoint_dir}; '
                    'submit it again, and it continues from its checkpoints.'
                )
            self._order = self._first
            return
        self._order = structs.replace(self._first, payload=b'', hold_s=self._client.hold_s)
        if self._ended:
            return
        self.state, self._progress = found.state, found.progress
        self.checkpoint = found.checkpoint or self.checkpoint
        if found.state == 'finished' and self.checkpoint is not None:
            self._settle_finished(self.checkpoint)
        elif found.state == 'cancelled':
            self._settle_cancelled()
        elif found.state in ('finished', 'failed'):
            said = found.sentence or f'The endpoint answered {found.state!r} without a checkpoint.'
            self.fail((BadInput if found.refused else TrainerFailed)(said))
        elif found.sentence:
            who = self._client.name
            logger.warning('%s cannot train %s now: %s', who, self.name, found.sentence)

    def _cancel(self) -> None:
        self._cancelling = True
        self._news.put(None)

    def fail(self, error: FreeTrainError) -> None:
        with self._lock:
            self._settle_failed(error)
        self._news.put(None)


class FreeTrainClient(Executor):
    """Trains at an endpoint of Globus Compute, whatever its engine.

    A :class:`concurrent.futures.Executor`, except that leaving a ``with`` block does not wait for
    trainers, which may take days and go on at the endpoint. While the client runs, it asks again
    what was lost because this computer slept or the endpoint was restarted. Raises BadInput unless
    exactly one of ``endpoint_id`` and ``executor`` is given, or if the Globus Compute SDK is not
    installed.

    Parameters
    ----------
    endpoint_id
        The endpoint's id.
    checkpoint_dir
        Absolute path of a folder at the endpoint that all nodes share. All trainers with the same
        one train in one run.
    site
        Where that run trains: see :func:`~parsl_freetrain.sites.named.site_described`. ``'local'``:
        in the endpoint's own job, as long as the client asks.
    python
        The Python at the endpoint that has parsl-freetrain; default: the one of its workers.
    user_endpoint_config
        Options for the endpoint's template: account, queue and so on.
    executor
        A :class:`globus_compute_sdk.Executor` or a Parsl GlobusComputeExecutor to use in place of
        ``endpoint_id`` and ``user_endpoint_config``.
    look_every_s
        Seconds between two requests about a trainer. With the site 'local' each stays at the
        endpoint for so long, unless the trainer ends: it keeps the endpoint's job from being idle.
    **settings
        Of the run, as plain data: those of :class:`~parsl_freetrain.BackfillProvider` and
        :class:`~parsl_freetrain.FreeTrainExecutor`. A run that goes on keeps its own.
    """

    def __init__(
        self,
        endpoint_id: str | None = None,
        *,
        checkpoint_dir: str = '',
        site: str | Mapping[str, Any] | None = None,
        python: str = '',
        user_endpoint_config: Mapping[str, Any] | None = None,
        executor: Any = None,
        look_every_s: float = 60.0,
        **settings: Any,
    ) -> None:
        if (endpoint_id is None) == (executor is None):
            raise BadInput('FreeTrainClient needs an endpoint_id or an executor: give one of them.')
        if executor is None:
            with needs('Submitting from afar'):
                import globus_compute_sdk as sdk
            how = {'endpoint_id': endpoint_id, 'user_endpoint_config': user_endpoint_config}
            self._new_executor = functools.partial(sdk.Executor, **how)
        known = endpoint_id or getattr(executor, 'endpoint_id', getattr(executor, 'label', ''))
        self.name = f'endpoint {known}' if known else 'the endpoint'
        self.look_every_s = look_every_s
        here = site == 'local' or (isinstance(site, Mapping) and site.get('type') == 'local')
        self.hold_s = look_every_s if here else 0.0
        self._given, self._executor = executor, executor
        self._folder, self._python = checkpoint_dir, python
        self._settings = settings if site is None else {'site': site, **settings}
        self._sending, self._naming = threading.Lock(), threading.Lock()
        self._open: dict[str, RemoteTraining] = {}
        self._closed = False

    def submit(  # type: ignore[override]  # it takes trainers only
        self, app: FreeTrainApp, /, *args: Any, trainer_name: str | None = None, **kwargs: Any
    ) -> RemoteTraining:
        """Start a trainer at the endpoint. Raises BadInput if this computer can tell that the
        trainer can never run. Errors found at the endpoint are set on the future.

        Parameters
        ----------
        app
            A function decorated with ``@freetrain_app``.
        *args, **kwargs
            Of the function after its fragment context: plain data, and paths over there.
        trainer_name
            Name of the trainer and of its checkpoint folder; default: the app's name, with a number
            from the second one on. A trainer of the same name continues from its checkpoints.
        """
        if not isinstance(app, FreeTrainApp):
            raise BadInput(
                f'FreeTrainClient sends trainers, and {getattr(app, "__name__", app)!r} is a plain '
                'function: decorate it with @freetrain_app, or send it with '
                'globus_compute_sdk.Executor(endpoint_id=...), also to the same endpoint.'
            )
        with self._naming:  # others may submit at once
            return self._follow(self._order(app, args, kwargs, trainer_name))

    def _order(
        self, app: FreeTrainApp, args: Any, kwargs: Any, trainer_name: str | None
    ) -> orders.Order:
        numbered = itertools.chain([app.name], (f'{app.name}-{n}' for n in itertools.count(2)))
        name = trainer_name or next(name for name in numbered if name not in self._open)
        check_name(name)
        why = f'Trainer {name!r} cannot be sent'
        if not (self._folder.startswith('/') and 'site' in self._settings):
            raise BadInput(
                f'{why}: the FreeTrainClient needs a checkpoint_dir at the endpoint, an absolute '
                "path, and a site, such as 'polaris' or 'local'."
            )
        payload, futures = pack(app.function, args, kwargs, name)
        if futures:
            raise BadInput(f'{why}: one of its arguments is a future; give its result().')
        if len(payload) > LARGEST_PAYLOAD:
            raise BadInput(
                f'{why}: its function and arguments have {len(payload)} bytes, and Globus Compute '
                f'takes {LARGEST_PAYLOAD}; put data into files there, and pass their paths.'
            )
        run, request = (self._folder, self._settings), secrets.token_hex(8)
        return orders.Order('train', *run, name, request, 0.0, probe.versions(), app.spec, payload)

    def attach(self, name: str) -> RemoteTraining:
        """Follow a trainer submitted before; the future raises BadInput if there is none."""
        with self._naming:
            return self._follow(orders.Order('look', self._folder, self._settings, name))

    def _follow(self, order: orders.Order) -> RemoteTraining:
        name = order.trainer
        if self._closed or name in self._open:
            why = 'is closed' if self._closed else 'follows one of this name already'
            raise BadInput(f'Trainer {name!r} cannot be sent: this FreeTrainClient {why}.')
        self._open[name] = training = RemoteTraining(self, order)
        training.add_done_callback(lambda _: self._open.pop(name, None))
        threading.Thread(target=training.follow, daemon=True).start()
        return training

    def trainers(self, timeout_s: float = 60.0) -> dict[str, tuple[str, Progress]]:
        """State and progress of all trainers of ``checkpoint_dir``. Raises BadInput if
        parsl-freetrain cannot be run there; TimeoutError.
        """
        found = self._answer_to(orders.Order('look', self._folder), timeout_s).trainers.items()
        return {name: (known.state, known.progress) for name, known in found}

    def compare_versions(self, timeout_s: float = 60.0) -> tuple[probe.Comparison, ...]:
        """Versions here and at the endpoint; raises as :meth:`trainers` does."""
        there = self._answer_to(orders.Order('look'), timeout_s)
        return probe.compare(probe.versions(), there.versions)

    def close(self) -> None:
        """Stop following. Trainers keep running; their futures raise an error that says where."""
        self._closed = True
        for name, training in list(self._open.items()):
            why = (
                f'Trainer {name!r} is not followed any more, because its FreeTrainClient was '
                f'closed; it goes on at {self.name}: attach({name!r}) follows it again.'
            )
            training.fail(TrainerFailed(why))
        if self._executor is not self._given:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop following, and before that wait for all trainers, or end them."""
        trainings = list(self._open.values())
        for training in trainings if cancel_futures else ():
            training.cancel()
        if wait:
            wait_for(trainings)
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer_to(self, order: orders.Order, timeout_s: float) -> orders.OrderAnswer:
        try:
            return orders.decoded(self.send(order).result(timeout_s), orders.OrderAnswer)
        except TimeoutError:
            why = f'{self.name} did not answer within {timeout_s:g} s; it may not be running.'
            raise TimeoutError(why) from None
        except Exception as error:
            raise self.refusal(error) or error from error

    def send(self, order: orders.Order) -> Future[bytes]:
        """The future of the answer, for :func:`.orders.decoded`."""
        try:
            with self._sending:
                if self._executor is None or getattr(self._executor, '_stopped', False):
                    self._executor = self._given or self._new_executor()
                resources: list[Any] = [{}] if isinstance(self._executor, ParslExecutor) else []
                words = (*resources, msgspec.msgpack.encode(order), self._python)
                sent: Future[bytes] = self._executor.submit(orders.run_or_join, *words)
        except Exception as error:
            sent = Future()
            sent.set_exception(error)
        return sent

    def refusal(self, error: BaseException) -> FreeTrainError | None:
        """The error to raise, or None if the endpoint is only unreachable for now."""
        if isinstance(error, FreeTrainError):
            return error
        status = getattr(error, 'http_status', None)
        lines = str(getattr(error, 'remote_data', error)).strip().splitlines() or ['']
        if type(error).__name__ == 'TaskExecutionFailed':
            return BadInput(
                f'parsl-freetrain cannot be run at {self.name} ({lines[-1]}): install it for the '
                "Python of its workers, or name one that has it with python='/path/to/python'."
            )
        if status in (401, 403) or _LOGIN & {cls.__name__ for cls in type(error).__mro__}:
            return BadInput(
                f'The login to Globus has expired, or does not allow {self.name} ({lines[0]}): log '
                'in again by running python -c "from globus_compute_sdk import Client; '
                'Client().app.login(force=True)" in a terminal.'
            )
        http = isinstance(status, int) and 400 <= status < 500 and status != 429
        if not (http or isinstance(error, (TypeError, ValueError))):
            return None
        return BadInput(
            f'Globus Compute refuses {self.name} ({f"HTTP {status}: " if http else ""}{lines[0]}): '
            'check the endpoint id, and the options in user_endpoint_config.'
        )
