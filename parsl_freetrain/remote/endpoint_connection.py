"""Sends orders to an endpoint, and explains errors of sending."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from parsl.executors.base import ParslExecutor

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.executor.globus.protocol import ORDER, Answer, Order

logger = logging.getLogger(__name__)

LARGEST_PAYLOAD = 7_000_000  # bytes; Globus Compute takes at most 10 MB, and base64 adds a third
_LOGIN_ERRORS = {
    'TokenValidationError',
    'LocalServerLoginError',
    'CommandLineLoginFlowEOFError',
}  # of globus_sdk, which moves them between modules


def placed_order(payload: str = '') -> str:
    """The function of the task that carries an order. An endpoint with FreeTrainEngine reads the
    order instead of calling this.
    """
    raise BadInput('This endpoint does not run FreeTrainEngine.')


class Connection:
    """Sends orders to one endpoint, from any thread.

    Parameters
    ----------
    endpoint_id, user_endpoint_config
        As :class:`globus_compute_sdk.Executor` takes them.
    executor
        A :class:`globus_compute_sdk.Executor` or a Parsl GlobusComputeExecutor, in place of these.

    Raises
    ------
    BadInput
        If the Globus Compute SDK is not installed.
    """

    def __init__(
        self, endpoint_id: str | None, user_endpoint_config: Mapping[str, Any] | None, executor: Any
    ) -> None:
        self._endpoint_id = endpoint_id
        self._config = None if user_endpoint_config is None else dict(user_endpoint_config)
        self._given = executor
        self._executor: Any = None
        self._sending = threading.Lock()
        if executor is None:
            _import_executor()

    @property
    def name(self) -> str:
        """The endpoint's name in messages."""
        known = (
            self._endpoint_id
            or getattr(self._given, 'endpoint_id', None)
            or getattr(self._given, 'label', None)
        )
        return f'endpoint {known}' if known else 'the endpoint'

    def send(self, order: Order, payload: str) -> Future[Answer]:
        """Send an order. The future fails if the order did not arrive, or it or its answer was not
        understood.
        """
        specification = {ORDER: order.to_json()}
        with self._sending:
            if self._executor is None or getattr(self._executor, '_stopped', False):
                self._executor = self._given if self._given is not None else self._connect()
            executor = self._executor
            if isinstance(executor, ParslExecutor):
                return _answers(executor.submit(placed_order, specification, payload))
            before = executor.resource_specification
            executor.resource_specification = specification
            try:
                return _answers(executor.submit(placed_order, payload))
            finally:
                executor.resource_specification = before

    def _connect(self) -> Any:
        return _import_executor()(endpoint_id=self._endpoint_id, user_endpoint_config=self._config)

    def close(self) -> None:
        """Close the executor, unless it was passed in."""
        with self._sending:
            made, self._executor = (None if self._executor is self._given else self._executor), None
        if made is not None:
            made.shutdown(wait=False, cancel_futures=True)

    def refusal(self, error: BaseException) -> FreeTrainError | None:
        """The error to raise if sending again is of no use; None if the endpoint is only
        unreachable for now.
        """
        if isinstance(error, FreeTrainError):
            return error
        status = getattr(error, 'http_status', None)
        if type(error).__name__ == 'TaskExecutionFailed':
            said = str(getattr(error, 'remote_data', error)).strip().splitlines() or ['']
            return BadInput(
                f'{self.name} did not take the order, because it does not run '
                'FreeTrainEngine or has another version of it: '
                f'use the template in site_configs/globus ({said[-1]}).'
            )
        if status in (401, 403) or _LOGIN_ERRORS & {cls.__name__ for cls in type(error).__mro__}:
            return BadInput(
                f'The login to Globus has expired, or does not allow {self.name} '
                f'({_first_line(error)}): log in again by '
                'running python -c "from globus_compute_sdk import Client; '
                'Client().app.login(force=True)" in a terminal.'
            )
        if isinstance(status, int) and 400 <= status < 500 and status != 429:
            return BadInput(
                f'Globus Compute refuses {self.name} (HTTP {status}: '
                f'{_first_line(error)}): check the endpoint id, and the '
                f'options in user_endpoint_config.'
            )
        if isinstance(error, (TypeError, ValueError)):
            return BadInput(
                f'Globus Compute refuses the order for {self.name}: {_first_line(error)}.'
            )
        return None


def _answers(sent: Future[Any]) -> Future[Answer]:
    """The future of the answer in a document."""
    answered: Future[Answer] = Future()

    def decode(done: Future[Any]) -> None:
        try:
            answered.set_result(Answer.from_document(done.result()))
        except BaseException as error:
            answered.set_exception(error)

    sent.add_done_callback(decode)
    return answered


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _import_executor() -> Any:
    try:
        from globus_compute_sdk import Executor
    except ImportError as error:
        raise BadInput(
            'Submitting from afar needs the Globus Compute SDK, which is not installed here: '
            "pip install 'parsl-freetrain[globus]'."
        ) from error
    return Executor
