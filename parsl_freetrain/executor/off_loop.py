"""Off the event loop: what is the user's and may never return, as handlers of logging."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

MOST = 10_000
"""Maximum number of log records and lines that wait; later ones are left out."""
LAST_S = 2.0
"""Maximum seconds for which the end of an event loop waits for them."""

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
