"""The future of a trainer, and names of trainers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from dataclasses import replace

from parsl.dataflow.memoization import id_for_memo

from parsl_freetrain.core.model.errors import BadInput, FreeTrainError
from parsl_freetrain.core.model.types import Checkpoint, Progress
from parsl_freetrain.executor.off_loop import in_thread
from parsl_freetrain.report.cells import trainer_html
from parsl_freetrain.report.status import TrainerNow

_COUNTS = ('samples', 'nodes', 'fragments', 'preempted', 'rescaled')


class TrainingFuture(Future[Checkpoint]):
    """The final :class:`~parsl_freetrain.core.model.types.Checkpoint` of a trainer.

    It can be an argument of any Parsl app. Made by calling a ``@freetrain_app``.

    Attributes
    ----------
    name : str
        The trainer's name.
    state : str
        'waiting' (for its arguments), 'queued' (no nodes now), 'running', 'finished', 'failed' or
        'cancelled'.
    checkpoint : Checkpoint or None
        The newest committed checkpoint.
    checkpoints : list of Future
        The checkpoint future (Parsl's AppFuture) of each fragment so far.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.state = 'waiting'
        self.checkpoint: Checkpoint | None = None
        self.checkpoints: list[Future[Checkpoint]] = []
        self._progress = Progress()
        self._replicas: Sequence[TrainingFuture] = ()  # the others of its training
        self._best: Callable[[], Checkpoint | None] | None = None
        self._on_cancel: Callable[[], None] | None = None
        self._lock = threading.RLock()
        self._withdrawn = False  # cancelled before it was submitted
        self._ended = False  # and settled, or about to be

    def progress(self) -> Progress:
        """The progress of the training, as of now; of all its replicas, if it has any."""
        every = [self._progress, *(one._progress for one in self._replicas)]
        sums = {name: sum(getattr(one, name) for one in every) for name in _COUNTS}
        return replace(self._progress, **{**sums, 'samples': sums['samples'] // len(every)})

    def _repr_html_(self) -> str:
        now = self.progress()
        shown = self.name, self.state, now.nodes, now.samples, now.total_samples, now.metrics
        counts = now.fragments, now.preempted, now.rescaled
        return trainer_html(TrainerNow(*(*shown, None, None, *counts)))

    def running(self) -> bool:
        return self.state == 'running'

    def cancel(self) -> bool:
        """Stop with a checkpoint; cancelled once its nodes are free. False: it has ended."""
        with self._lock:
            if self._ended:
                return False
            on_cancel = self._on_cancel
            self._withdrawn = on_cancel is None
        if on_cancel is None:
            self._settle_cancelled()
            wait([self])  # for no callbacks
        else:
            on_cancel()
        return True

    def _submitted(self, submit: Callable[[], None], on_cancel: Callable[[], None]) -> bool:
        """Submit the trainer (``on_cancel`` cancels it then); False if it was cancelled before."""
        with self._lock:
            if self._withdrawn or self._ended:
                return False
            submit()
            self._on_cancel = on_cancel
        return True

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The final checkpoint, when the training has ended; with the best one as ``best``."""
        if timeout is None:  # a signal that arrives just before a wait begins is seen after it only
            while not wait([self], 1.0).done:
                pass
        found = super().result(timeout)
        if found.best is None and self._best is not None:  # the files are read here, for the caller
            with suppress(OSError, FreeTrainError):
                return replace(found, best=self._best())
        return found

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As any future's, but it returns CancelledError: Parsl's join apps would wait for ever."""
        try:
            return super().exception(timeout)
        except CancelledError as error:
            return error

    def _settle_finished(
        self, checkpoint: Checkpoint, best: Callable[[], Checkpoint | None] | None = None
    ) -> None:
        self._best = best
        self._settle('finished', lambda: self.set_result(checkpoint))

    def _settle_cancelled(self) -> None:
        self._settle('cancelled', self._notify_cancelled)

    def _settle_failed(self, error: BaseException | Callable[[], BaseException]) -> None:
        self._settle(
            'failed',
            lambda: self.set_exception(error if isinstance(error, BaseException) else error()),
        )

    def _notify_cancelled(self) -> None:
        if super().cancel():
            self.set_running_or_notify_cancel()

    def _settle(self, state: str, settle: Callable[[], object]) -> None:
        """Settle once, in a thread of its own: callbacks are the user's, the caller the loop."""
        with self._lock:
            if self._ended:
                return
            self._ended, self.state = True, state
        in_thread(settle, f'FreeTrain-{self.name}')

    def __repr__(self) -> str:
        progress = self.progress()
        why = ''
        if self.done() and not self.cancelled() and (error := self.exception()) is not None:
            # Parsl names the cause of an app's failure by this text.
            why = f': {type(error).__name__}: {" ".join(str(error).split())}'
        return (
            f'<TrainingFuture {self.name!r} {self.state}, {progress.samples} of '
            f'{progress.total_samples or "?"} samples{why}>'
        )


class TrainerNames:
    """The names of one run's trainers, each used once. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def take(self, name: str, *, explicit: bool) -> str:
        """``name``, or if it is taken ``name-2`` and so on; BadInput if it is ``explicit``."""
        with self._lock:
            if explicit and name in self._taken:
                raise BadInput(
                    f'There is a trainer {name!r} in this run already; give another trainer_name.'
                )
            free, number = name, 1
            while free in self._taken:
                number += 1
                free = f'{name}-{number}'
            self._taken.add(free)
        return free

    def free(self, name: str) -> None:
        with self._lock:
            self._taken.discard(name)


@id_for_memo.register(Checkpoint)
def _memo_id(checkpoint: Checkpoint, output_ref: bool = False) -> bytes:
    """What Parsl's memoization takes for the same checkpoint: a path is never used twice."""
    return f'{checkpoint.trainer}\0{checkpoint.path}\0{checkpoint.samples}'.encode()
