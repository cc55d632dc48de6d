"""Off the event loop: what is the user's and may never return, as handlers of logging."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

MOST = 10_000  # maximum number of log records and lines that wait; later ones are left out
LAST_S = 2.0  # maximum seconds for which the end of an event loop waits for them

_waiting: dict[int, queue.Queue[Callable[[], object] | None]] = {}  # by the thread of a loop
_call_handlers = logging.Logger.callHandlers


def in_thread(work: Callable[[], object], name: str) -> None:
    """Do some work in a thread of its own; here if no thread can be had."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        work()


def run(what: Callable[[], object]) -> bool:
    """Call it in another thread if this is an event loop's. False if too much waits."""
    if (waiting := _waiting.get(threading.get_ident())) is None:
        what()
        return True
    try:
        waiting.put_nowait(what)
    except queue.Full:
        return False
    return True


class FileThread:
    """Does work on files, one at a time: where a file system stalls, nobody waits for long."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._over.set()
        self._thread: threading.Thread | None = None

    def over(self, wait_s: float = 0.0) -> bool:
        return self._over.wait(wait_s)

    def do(self, work: Callable[[], object], wait_s: float) -> bool:
        """Whether it is done within so many seconds; not begun while other work is not over."""
        if not self.over():
            return False
        if self._thread is None:
            output = _waiting.get(threading.get_ident())
            run, name = lambda: self._run(output), 'FreeTrain-Files'
            self._thread = threading.Thread(target=run, name=name, daemon=True)
            self._thread.start()
        self._over.clear()
        self._work.put(work)
        return self.over(wait_s)

    def close(self) -> None:
        self._work.put(None)
        if self._thread is not None and self.over():
            self._thread.join()

    def _run(self, output: queue.Queue[Callable[[], object] | None] | None) -> None:
        """``output``: what the event loop logs goes through it, and so does what this does."""
        if output is not None:
            _waiting[threading.get_ident()] = output
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception('The event loop goes on after an error of files')
            self._over.set()
        _waiting.pop(threading.get_ident(), None)


@contextmanager
def beside_this_thread() -> Iterator[None]:
    """Declare this thread an event loop's."""
    waiting = _waiting[threading.get_ident()] = queue.Queue(MOST)
    thread = threading.Thread(target=_work, args=(waiting,), name='FreeTrain-Output', daemon=True)
    thread.start()
    try:
        yield
    finally:
        del _waiting[threading.get_ident()]
        if waiting.full():
            with suppress(queue.Empty):
                waiting.get_nowait()
        waiting.put_nowait(None)  # nobody else puts
        thread.join(LAST_S)


def _work(waiting: queue.Queue[Callable[[], object] | None]) -> None:
    while (what := waiting.get()) is not None:
        try:
            what()
        except Exception:
            logger.exception('Something could not be written')


def _handle(self: logging.Logger, record: logging.LogRecord) -> None:
    run(lambda: _call_handlers(self, record))


# The only place through which the records of all loggers go, ours, Parsl's and others'.
logging.Logger.callHandlers = _handle  # type: ignore[method-assign]
