"""FreeTrainClient: submit trainers from a laptop, follow them, and find them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from concurrent.futures import wait as wait_for
from typing import Any

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.globus.protocol import (
    LOOK,
    OK,
    VERSIONS,
    WAIT,
    Answer,
    Comparison,
    Order,
    compare,
    versions_here,
)
from parsl_freetrain.executor.trainer.future import Progress
from parsl_freetrain.remote.endpoint_connection import Connection
from parsl_freetrain.remote.following import Follower
from parsl_freetrain.remote.remote_future import RemoteTraining
from parsl_freetrain.remote.sending import order_of


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
        first_backoff_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (endpoint_id is None) == (executor is None):
            raise BadInput(
                'FreeTrainClient needs an endpoint_id, or an executor that knows its '
                'endpoint; give one of them.'
            )
        self._connection = Connection(endpoint_id, user_endpoint_config, executor)
        self._follower = Follower(self._connection, look_every_s, first_backoff_s, clock)

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
        return self._follower.follow(order, payload)

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
        return self._follower.follow(Order(WAIT, name))

    def trainers(self, timeout_s: float = 60.0) -> dict[str, tuple[str, Progress]]:
        """State and progress of all trainers submitted since the endpoint's process started.

        Raises
        ------
        BadInput
            If the endpoint does not run FreeTrainEngine.
        TimeoutError
            If the endpoint does not answer in time.
        """
        found = self._answered(Order(LOOK), timeout_s).trainers
        return {name: (known.state, known.progress) for name, known in found.items()}

    def compare_versions(self, timeout_s: float = 60.0) -> tuple[Comparison, ...]:
        """Versions here and at the endpoint; raises as :meth:`trainers` does."""
        return compare(versions_here(), self._answered(Order(VERSIONS), timeout_s).versions)

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
        if reply.kind != OK:
            raise BadInput(reply.sentence)
        return reply

    def close(self) -> None:
        """Stop following. Trainers keep running at the endpoint; their futures here raise an error
        that says how to find them again.
        """
        self._follower.close()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop following, and before that wait for all trainers, or end them."""
        trainings = self._follower.trainings()
        if cancel_futures:
            for training in trainings:
                training.cancel()
        if wait:
            wait_for(trainings)
        self.close()

    def __exit__(self, *_: object) -> None:
        self.close()
