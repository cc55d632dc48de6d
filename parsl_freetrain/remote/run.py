"""``python -m parsl_freetrain.remote.run``: the run of a checkpoint folder, while it has orders."""

import logging
import pickle
import signal
import sys
import threading
import time
from contextlib import suppress

import parsl
from msgspec import structs
from parsl.config import Config

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.state import FINAL_STATES
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.host.processes import start_of
from parsl_freetrain.remote.endpoint import LABEL, Desk
from parsl_freetrain.remote.orders import Order, TrainerStatus
from parsl_freetrain.sites.provider import BackfillProvider

logger = logging.getLogger(__name__)

LOOK_S = 0.5
LINGER_S = 30.0  # seconds for which a run without orders keeps its blocks


class OrderedRun:
    """Starts a trainer for each order, and says how they are. ``executor``: is started."""

    def __init__(self, desk: Desk, executor: FreeTrainExecutor) -> None:
        self._desk, self._executor = desk, executor
        self._trainers: dict[str, tuple[str, TrainingFuture]] = {}  # with their requests
        self._told: dict[str, TrainerStatus] = {}

    def look(self) -> bool:
        """Start, cancel, and tell. Returns whether any trainer is open."""
        readable = self._desk.readable(self._desk.names() - self._trainers.keys())
        for order in readable:
            self._start(order)
        for name, (request, future) in list(self._trainers.items()):
            if self._desk.path(name, 'cancel').exists():
                future.cancel()
            if future.state in FINAL_STATES and not future.done():
                continue  # in a moment
            error = future.exception() if future.done() and not future.cancelled() else None
            now = TrainerStatus(request, future.state, future.progress(), future.checkpoint)
            if (status := _saying(error, now)) != self._told.get(name):
                try:
                    self._desk.tell(name, status)
                except OSError as error:  # of the disk, which may be full: it is told again
                    logger.warning('What trainer %s does cannot be told: %s', name, error)
                    continue
                self._told[name] = status
            if status.state in FINAL_STATES:
                del self._trainers[name], self._told[name]
                self._executor.names.free(name)
        return bool(readable) or bool(self._trainers)

    def _start(self, order: Order) -> None:
        known, name, spec = self._desk.status(order.trainer), order.trainer, order.spec
        try:
            if spec is None:
                raise BadInput(f'The order to train {name!r} does not say what is trained.')
            if known is not None and known.request == order.request and known.state != 'sent':
                # It has begun already, whatever it said of checkpoints before that.
                again = structs.replace(spec.checkpoints, resume='auto')
                spec = structs.replace(spec, checkpoints=again)
            function, args, kwargs = pickle.loads(order.payload)  # noqa: S301  # as any task's
            app = FreeTrainApp(function, spec, None)
            self._trainers[name] = order.request, app(*args, trainer_name=name, **kwargs)
        except Exception as error:
            with suppress(OSError):  # the next look starts it again
                self._desk.tell(name, _saying(error, TrainerStatus(order.request, 'failed')))


def _saying(error: BaseException | None, status: TrainerStatus) -> TrainerStatus:
    """With what is wrong, if anything."""
    if error is None:
        return status
    said = str(error) if isinstance(error, FreeTrainError) else f'{type(error).__name__}: {error}'
    said = ' '.join([said, *getattr(error, '__notes__', ())])
    return structs.replace(status, sentence=said, refused=isinstance(error, BadInput | ImportError))


def main(checkpoint_dir: str, worker: str, start: str) -> None:
    """Run until all is done, or SIGTERM, at which orders stay for the next run."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    desk = Desk(checkpoint_dir)
    if not (waiting := desk.readable(desk.names())):
        return
    try:
        executor = FreeTrainExecutor.described(waiting[0].settings, LABEL, checkpoint_dir)
        assert isinstance(executor.provider, BackfillProvider)
        parsl.load(Config(executors=[executor], run_dir=str(desk.folder / 'runinfo')))
    except Exception as error:
        logger.exception('The run in %s cannot be started', checkpoint_dir)
        if desk.has_run():  # it was quicker, and takes the orders
            return
        for order in desk.readable(desk.names()):
            known = desk.status(order.trainer) or TrainerStatus(order.request)
            # If it is not refused, the next request tries again: a scheduler may not have answered.
            if (status := _saying(error, known)).refused:
                status = structs.replace(status, state='failed')
            desk.tell(order.trainer, status)
        return
    run, idle_since = OrderedRun(desk, executor), time.monotonic()
    while not stop.wait(LOOK_S) and time.monotonic() - idle_since < LINGER_S:
        if run.look():
            idle_since = time.monotonic()
        if executor.provider.site.is_local and start_of(int(worker)) != start:
            break
    parsl.dfk().cleanup()


if __name__ == '__main__':
    main(*sys.argv[1:])
