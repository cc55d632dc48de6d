"""Where orders from afar are taken: trainers of a FreeTrainExecutor without a DataFlowKernel."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parsl.serialize import pack_apply_message

from parsl_freetrain.core.errors import BadInput, FreeTrainError
from parsl_freetrain.core.words import Checkpoint
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.future import TrainingFuture
from parsl_freetrain.executor.member import fragment_task
from parsl_freetrain.executor.orders import (
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
    answer,
    described,
    refuse_differences,
    versions_here,
)
from parsl_freetrain.executor.trainers import TrainerRecord
from parsl_freetrain.training.store import PosixCheckpointStore, claim

logger = logging.getLogger(__name__)

_THRESHOLD = 1 << 20    # bytes; as Parsl's own executor packs its tasks


@dataclass(frozen=True)
class _Known:
    """A trainer that was ordered, and by which request."""

    request: str
    future: TrainingFuture


class Desk:
    """Carries orders out, one after the other; what takes long is answered later.

    Parameters
    ----------
    executor
        Started; trains in its holes.
    """

    def __init__(self, executor: FreeTrainExecutor) -> None:
        self._executor = executor
        self._trainers: dict[str, _Known] = {}
        self._closing = False
        # Verifying the checkpoints that a trainer finds can take minutes, and whoever brings orders must not wait for it.
        self._clerk = ThreadPoolExecutor(max_workers=1, thread_name_prefix='FreeTrain-Desk')

    def take(self, order: Order, payload: Callable[[], bytes]) -> Future[Answer]:
        """Carry an order out.

        Parameters
        ----------
        payload
            Gives the function of a trainer with its arguments; called only once all that can be compared has been.

        Returns
        -------
        Future of Answer
            Never fails: whatever goes wrong is an answer too.
        """
        outcome: Future[Answer] = Future()
        self._clerk.submit(self._serve, order, payload, outcome)
        return outcome

    def close(self) -> None:
        """Trainers that end from now on have been interrupted."""
        self._closing = True
        self._clerk.shutdown(wait=True)

    def _serve(self, order: Order, payload: Callable[[], bytes], outcome: Future[Answer]) -> None:
        try:
            reply = self._reply(order, payload)
        except BadInput as error:
            reply = answer(BAD_INPUT, str(error))
        except Exception as error:
            logger.exception('Order %s of trainer %s failed', order.verb, order.trainer)
            reply = answer(FAILED, _sentence(error))
        if isinstance(reply, TrainingFuture):
            reply.add_done_callback(lambda done: outcome.set_result(self._end_of(done)))
        else:
            outcome.set_result(reply)

    def _reply(self, order: Order, payload: Callable[[], bytes]) -> Answer | TrainingFuture:
        known = self._trainers.get(order.trainer)
        match order.verb:
            case 'versions':
                return answer(OK, versions=versions_here())
            case 'train':
                if known is not None and known.request == order.request:
                    return known.future
                return self._start(order, payload, known)
            case 'look':
                shown = self._trainers if not order.trainer else {} if known is None else {order.trainer: known}
                return answer(OK, trainers={name: _shown(found) for name, found in shown.items()})
        if known is None:
            there = ', '.join(map(repr, self._trainers)) or 'none'
            return answer(UNKNOWN, f'The endpoint has no trainer {order.trainer!r} since its start, it has {there}; '
                                   f'submit it again, and it continues from its checkpoints.')
        match order.verb:
            case 'wait':
                return known.future
            case 'cancel':
                known.future.cancel()
                return answer(OK)
        verbs = ', '.join(map(repr, (VERSIONS, TRAIN, WAIT, LOOK, CANCEL)))
        raise BadInput(f'The endpoint knows no order {order.verb!r}; it knows {verbs}.')

    def _start(self, order: Order, payload: Callable[[], bytes], earlier: _Known | None) -> TrainingFuture:
        refuse_differences(order.versions, versions_here())
        _refuse_missing(order)
        name, executor = order.trainer, self._executor
        if earlier is not None and not earlier.future.done():
            raise BadInput(f'Trainer {name!r} is {earlier.future.state} at this endpoint already, from another submission: attach to it, '
                           f'cancel it first, or give this one another trainer_name.')
        folder = Path(executor.checkpoint_dir).absolute() / name
        trainer, terms = described(order.description, str(folder))
        resume = 'auto' if order.again else order.description.get('resume') or executor.resume
        if earlier is not None:
            executor.names.free(name)
        executor.names.take(name, explicit=True)
        try:
            checkpoint = claim(folder, name, order.description['identity'], resume)
            future = TrainingFuture(name)
            executor.submit_trainer(TrainerRecord(
                trainer=trainer, terms=terms, launch=self._launcher(payload()), future=future,
                checkpoint=checkpoint or Checkpoint(name, '', 0, 0),
                fragments_before=PosixCheckpointStore(folder, name).last_fragment()))
        except BaseException:
            if earlier is None:
                executor.names.free(name)
            raise
        self._trainers[name] = _Known(order.request, future)
        return future

    def _launcher(self, payload: bytes) -> Callable[[Mapping[str, Any], Future[Checkpoint] | Checkpoint], Future[Checkpoint]]:
        """What submits the trainer's fragments: as Parsl's DataFlowKernel would, which an endpoint has not."""

        def launch(specification: Mapping[str, Any], previous: Future[Checkpoint] | Checkpoint) -> Future[Checkpoint]:
            self._executor.validate_resource_spec(dict(specification))
            checkpoint = previous.result() if isinstance(previous, Future) else previous
            buffer = pack_apply_message(fragment_task, (payload, checkpoint), {}, buffer_threshold=_THRESHOLD)
            task: Future[Checkpoint] = self._executor.submit_payload({'resource_spec': dict(specification)}, buffer)
            return task

        return launch

    def _end_of(self, done: Future[Checkpoint]) -> Answer:
        try:
            return answer(OK, checkpoint=asdict(done.result()))
        except CancelledError:
            return answer(CANCELLED)
        except BadInput as error:
            return answer(BAD_INPUT, str(error))
        except Exception as error:
            return answer(INTERRUPTED if self._closing else FAILED, _sentence(error))


def _refuse_missing(order: Order) -> None:
    missing = [module for module in order.modules if importlib.util.find_spec(module) is None]
    if missing:
        plural = 's' * (len(missing) > 1)
        raise BadInput(f"The function of trainer {order.trainer!r} needs the module{plural} {', '.join(missing)}, which the endpoint's "
                       f'Python does not have: install what is missing there, or import it inside a try in the function.')


def _shown(known: _Known) -> dict[str, Any]:
    checkpoint = known.future.checkpoint
    return {'request': known.request, 'state': known.future.state, 'progress': asdict(known.future.progress()),
            'checkpoint': None if checkpoint is None else asdict(checkpoint)}


def _sentence(error: BaseException) -> str:
    said = str(error) if isinstance(error, FreeTrainError) else f'{type(error).__name__}: {error}'
    return ' '.join([said, *getattr(error, '__notes__', ())])
