"""Handles orders of remote clients: a FreeTrainExecutor without a DataFlowKernel."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parsl.serialize import pack_apply_message

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.fragment.worker_tasks import fragment_task
from parsl_freetrain.executor.globus.protocol import (
    BAD_INPUT,
    CANCEL,
    CANCELLED,
    FAILED,
    INTERRUPTED,
    LOOK,
    OK,
    TRAIN,
    UNKNOWN,
    VERSIONS,
    WAIT,
    Answer,
    Order,
    TrainerStatus,
    refuse_differences,
    versions_here,
)
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.executor.trainer.trainer_record import TrainerRecord
from parsl_freetrain.training.checkpoint.folder_claim import claim
from parsl_freetrain.training.checkpoint.store import PosixCheckpointStore

logger = logging.getLogger(__name__)

_THRESHOLD = 1 << 20  # bytes; as in Parsl's own executor


@dataclass(frozen=True)
class _Known:
    """A trainer, and the request that ordered it."""

    request: str
    future: TrainingFuture


class TrainerService:
    """Carries out orders one after the other. Long ones are answered later. ``executor``: a started
    executor; it trains in its holes.
    """

    def __init__(self, executor: FreeTrainExecutor) -> None:
        self._executor = executor
        self._trainers: dict[str, _Known] = {}
        self._closing = False
        # Verifying a trainer's checkpoints can take minutes, and the caller must not wait for it.
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix='FreeTrain-TrainerService'
        )

    def take(self, order: Order, payload: Callable[[], bytes]) -> Future[Answer]:
        """Carry out an order.

        Parameters
        ----------
        payload
            Returns a trainer's function with its arguments. It is called only after all versions
            have been compared.

        Returns
        -------
        Future of Answer
            It never fails: an error is an answer too.
        """
        outcome: Future[Answer] = Future()
        self._thread.submit(self._serve, order, payload, outcome)
        return outcome

    def close(self) -> None:
        """Treat trainers that end from now on as interrupted."""
        self._closing = True
        self._thread.shutdown(wait=True)

    def _serve(self, order: Order, payload: Callable[[], bytes], outcome: Future[Answer]) -> None:
        try:
            reply = self._reply(order, payload)
        except BadInput as error:
            reply = Answer(BAD_INPUT, str(error))
        except Exception as error:
            logger.exception('Order %s of trainer %s failed', order.verb, order.trainer)
            reply = Answer(FAILED, _sentence(error))
        if isinstance(reply, TrainingFuture):
            reply.add_done_callback(lambda done: outcome.set_result(self._end_of(done)))
        else:
            outcome.set_result(reply)

    def _reply(self, order: Order, payload: Callable[[], bytes]) -> Answer | TrainingFuture:
        known = self._trainers.get(order.trainer)
        match order.verb:
            case 'versions':
                return Answer(OK, versions=versions_here())
            case 'train':
                if known is not None and known.request == order.request:
                    return known.future
                return self._start(order, payload, known)
            case 'look':
                shown = (
                    self._trainers
                    if not order.trainer
                    else {}
                    if known is None
                    else {order.trainer: known}
                )
                return Answer(OK, trainers={name: _status(found) for name, found in shown.items()})
        if known is None:
            there = ', '.join(map(repr, self._trainers)) or 'none'
            return Answer(
                UNKNOWN,
                f'The endpoint has no trainer {order.trainer!r} since its start, it has {there}; '
                f'submit it again, and it continues from its checkpoints.',
            )
        match order.verb:
            case 'wait':
                return known.future
            case 'cancel':
                known.future.cancel()
                return Answer(OK)
        verbs = ', '.join(map(repr, (VERSIONS, TRAIN, WAIT, LOOK, CANCEL)))
        raise BadInput(f'The endpoint knows no order {order.verb!r}; it knows {verbs}.')

    def _start(
        self, order: Order, payload: Callable[[], bytes], earlier: _Known | None
    ) -> TrainingFuture:
        refuse_differences(order.versions, versions_here())
        _refuse_missing(order)
        name, executor = order.trainer, self._executor
        if earlier is not None and not earlier.future.done():
            raise BadInput(
                f'Trainer {name!r} is {earlier.future.state} at this endpoint already, '
                'from another submission: attach to it, '
                f'cancel it first, or give this one another trainer_name.'
            )
        folder = Path(executor.checkpoint_dir).absolute() / name
        if order.spec is None:
            raise BadInput(f'The order to train {name!r} does not say what is trained.')
        trainer = order.spec.trainer(name)
        resume = 'auto' if order.again else order.spec.checkpoints.resume or executor.resume
        if earlier is not None:
            executor.names.free(name)
        executor.names.take(name, explicit=True)
        try:
            checkpoint = claim(folder, name, order.identity, resume)
            future = TrainingFuture(name)
            executor.submit_trainer(
                TrainerRecord(
                    trainer=trainer,
                    spec=order.spec,
                    store=str(folder),
                    launch=self._launcher(payload()),
                    future=future,
                    checkpoint=checkpoint or Checkpoint(name, '', 0, 0),
                    fragments_before=PosixCheckpointStore(folder, name).last_fragment(),
                )
            )
        except BaseException:
            if earlier is None:
                executor.names.free(name)
            raise
        self._trainers[name] = _Known(order.request, future)
        return future

    def _launcher(
        self, payload: bytes
    ) -> Callable[[Mapping[str, Any], Future[Checkpoint] | Checkpoint], Future[Checkpoint]]:
        """A function that submits the trainer's fragments in place of Parsl's DataFlowKernel, which
        does not exist on an endpoint.
        """

        def launch(
            specification: Mapping[str, Any], previous: Future[Checkpoint] | Checkpoint
        ) -> Future[Checkpoint]:
            self._executor.validate_resource_spec(dict(specification))
            checkpoint = previous.result() if isinstance(previous, Future) else previous
            buffer = pack_apply_message(
                fragment_task, (payload, checkpoint), {}, buffer_threshold=_THRESHOLD
            )
            task: Future[Checkpoint] = self._executor.submit_payload(
                {'resource_spec': dict(specification)}, buffer
            )
            return task

        return launch

    def _end_of(self, done: Future[Checkpoint]) -> Answer:
        try:
            return Answer(OK, checkpoint=done.result())
        except CancelledError:
            return Answer(CANCELLED)
        except BadInput as error:
            return Answer(BAD_INPUT, str(error))
        except Exception as error:
            return Answer(INTERRUPTED if self._closing else FAILED, _sentence(error))


def _refuse_missing(order: Order) -> None:
    missing = [module for module in order.modules if importlib.util.find_spec(module) is None]
    if missing:
        plural = 's' * (len(missing) > 1)
        raise BadInput(
            f'The function of trainer {order.trainer!r} needs the module{plural} '
            f"{', '.join(missing)}, which the endpoint's "
            'Python does not have: install what is missing there, or import it inside a '
            'try in the function.'
        )


def _status(known: _Known) -> TrainerStatus:
    future = known.future
    return TrainerStatus(known.request, future.state, future.progress(), future.checkpoint)


def _sentence(error: BaseException) -> str:
    said = str(error) if isinstance(error, FreeTrainError) else f'{type(error).__name__}: {error}'
    return ' '.join([said, *getattr(error, '__notes__', ())])
