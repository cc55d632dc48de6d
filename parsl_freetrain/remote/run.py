"""``python -m parsl_freetrain.remote.run``: the run of a checkpoint folder, while it has orders."""

from __future__ import annotations

import logging
import pickle
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import parsl
from msgspec import structs
from parsl.config import Config

from parsl_freetrain.app import FreeTrainApp
from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.executor.executor import FreeTrainExecutor
from parsl_freetrain.executor.run_lock import refuse_live
from parsl_freetrain.executor.settings import HtexOptions, Policy, Recording, Timeouts
from parsl_freetrain.executor.trainer.future import TrainingFuture
from parsl_freetrain.host.processes import start_of
from parsl_freetrain.remote.endpoint import LABEL, Desk
from parsl_freetrain.remote.orders import BAD_INPUT, CANCELLED, FAILED, OK, Order, TrainerStatus
from parsl_freetrain.sites.named import site_described
from parsl_freetrain.sites.provider import BackfillProvider

logger = logging.getLogger(__name__)

LOOK_S = 0.5
LINGER_S = 30.0  # seconds for which a run without orders keeps its blocks
PROVIDER = {'max_blocks', 'min_hole_s', 'worker_init'}
GROUPS = {'recording': Recording, 'policy': Policy, 'timeouts': Timeouts, 'htex': HtexOptions}


def executor_of(settings: Mapping[str, Any], checkpoint_dir: str) -> FreeTrainExecutor:
    """The executor that an order describes. Raises BadInput if a setting cannot be used."""
    given = dict(settings)
    site = site_described(given.pop('site', ''))
    provider = BackfillProvider(site, **{name: given.pop(name) for name in PROVIDER & given.keys()})
    for name in GROUPS.keys() & given.keys():
        given[name] = GROUPS[name](**given[name])
    return FreeTrainExecutor(provider, LABEL, checkpoint_dir, **given)


class OrderedRun:
    """Starts a trainer for each order, and says how they are. ``executor``: is started."""

    def __init__(self, desk: Desk, executor: FreeTrainExecutor) -> None:
        self._desk, self._executor = desk, executor
        self._trainers: dict[str, tuple[str, TrainingFuture]] = {}  # with their requests
        self._told: dict[str, TrainerStatus] = {}

    def look(self) -> bool:
        """Start, cancel, and tell. Returns whether any trainer is open."""
        readable = self._desk.readable(self._desk.open_names() - self._trainers.keys())
        for order in readable.values():
            self._start(order)
        for name in self._desk.open_names() & self._trainers.keys():
            if self._desk.path(name, 'cancel').exists():
                self._trainers[name][1].cancel()
        for name, (request, future) in list(self._trainers.items()):
            status = _status(request, future)
            if status != self._told.get(name):
                try:
                    self._desk.tell(name, status)
                except OSError as error:  # of the disk, which may be full: it is told again
                    logger.warning('What trainer %s does cannot be told: %s', name, error)
                    continue
                self._told[name] = status
            if status.end:
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
            end, said = _how(error)
            status = TrainerStatus(order.request, 'failed', end=end, sentence=said)
            with suppress(OSError):  # the next look starts it again
                self._desk.tell(name, status)


def _status(request: str, future: TrainingFuture) -> TrainerStatus:
    end, sentence = '', ''
    if future.done():
        end, sentence = (CANCELLED, '') if future.cancelled() else _how(future.exception())
    return TrainerStatus(request, future.state, future.progress(), future.checkpoint, end, sentence)


def _how(error: BaseException | None) -> tuple[str, str]:
    if error is None:
        return OK, ''
    said = str(error) if isinstance(error, FreeTrainError) else f'{type(error).__name__}: {error}'
    end = BAD_INPUT if isinstance(error, BadInput | ImportError) else FAILED
    return end, ' '.join([said, *getattr(error, '__notes__', ())])


def main(checkpoint_dir: str, worker: str, start: str) -> None:
    """Run until all is done, or SIGTERM, at which orders stay for the next run."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    desk = Desk(checkpoint_dir)
    readable = desk.readable(desk.open_names())
    if not readable:
        return
    try:
        settings = readable[min(readable)].settings
        executor = executor_of(settings, checkpoint_dir)
        assert isinstance(executor.provider, BackfillProvider)
        with_worker = executor.provider.site.is_local
        run_dir = str(desk.folder / 'runinfo')
        parsl.load(Config(executors=[executor], run_dir=run_dir))
    except Exception as error:
        logger.exception('The run in %s cannot be started', checkpoint_dir)
        try:
            refuse_live(desk.checkpoint_dir)
        except BadInput:  # one that was quicker takes the orders
            return
        end, said = _how(error)
        for name, order in desk.readable(desk.open_names()).items():
            known = desk.status(name) or TrainerStatus(order.request)
            if end == BAD_INPUT:
                known = structs.replace(known, state='failed', end=end)
            # Otherwise the next request tries it again: a scheduler may not have answered.
            desk.tell(name, structs.replace(known, sentence=said))
        return
    run, idle_since = OrderedRun(desk, executor), time.monotonic()
    while not stop.wait(LOOK_S) and time.monotonic() - idle_since < LINGER_S:
        if run.look():
            idle_since = time.monotonic()
        if with_worker and start_of(int(worker)) != start:
            break
    parsl.dfk().cleanup()


if __name__ == '__main__':
    main(*sys.argv[1:])
