"""The stream of a run's events: appended to the journal, published, and kept for the controller."""

import logging
import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from parsl_freetrain.core.model import events as ev
from parsl_freetrain.executor.off_loop import FileThread
from parsl_freetrain.journal.append import FLEETING, MOST_HELD

logger = logging.getLogger(__name__)

FILES_S, STALLED_S, LAST_S = 0.5, 10.0, 5.0
"""Maximum seconds for which the event loop waits for files, until it says that it does not, and in
the end."""
_STALLED = (
    'The file system of the ledger has not answered for %.0f s. The run goes on, and keeps its '
    'events in memory until then.'
)


class Subscriber(Protocol):
    """Follows the events of a run. Only the event loop's thread calls it."""

    def take(self, event: ev.Event) -> None:
        """Handle one event; ignore those of no interest."""

    def flush(self) -> None:
        """Write down what is pending, since no more events are known now; by default, nothing."""
        return


class Stream:
    """Publishes to ``recorders`` (of files) and ``subscribers``; keeps what the controller gets."""

    def __init__(
        self,
        subscribers: Sequence[Subscriber],
        recorders: Sequence[Subscriber] = (),
        files: FileThread | None = None,
    ) -> None:
        self.subscribers, self._recorders, self._files = list(subscribers), tuple(recorders), files
        self._batch: list[ev.Event] = []
        self._unrecorded: list[ev.Event] = []
        self._recorded_at = monotonic()

    def emit(self, *events: ev.Event) -> None:
        """Record and publish events; keep what concerns the controller for the next batch."""
        for event in events:
            if not isinstance(event, ev.NOTES):
                self._batch.append(event)
            if self._files is None:
                _publish(event, self._recorders)
            else:
                self._unrecorded.append(event)
            _publish(event, self.subscribers)

    def pass_by(self, event: ev.Event) -> None:
        """Publish an event that is neither recorded nor decided about."""
        _publish(event, self.subscribers)

    def next_batch(self) -> tuple[ev.Event, ...]:
        events, self._batch = tuple(self._batch), []
        return events

    def flush(self) -> None:
        _flush(self.subscribers)
        if self._files is None:
            _flush(self._recorders)
        elif self._unrecorded and self._files.over():
            events, self._unrecorded = self._unrecorded, []
            self._recorded_at = monotonic()
            self.beside(lambda: self._record(events))
        elif self._unrecorded and monotonic() - self._recorded_at > STALLED_S:
            self._recorded_at = math.inf  # it is said once
            logger.warning(_STALLED, STALLED_S)
        if len(self._unrecorded) > MOST_HELD:
            self._unrecorded = [e for e in self._unrecorded if not isinstance(e, FLEETING)]

    def beside(self, work: Callable[[], object]) -> bool:
        """Do work on files; False if it, or other such work, takes long."""
        if self._files is None:
            work()
            return True
        return self._files.do(work, FILES_S)

    def close(self) -> None:
        """Record the rest; a file system that stalls is not waited for without end."""
        if self._files is not None:
            self._files.over(LAST_S)
            self.flush()
            if not self._files.over(LAST_S):
                logger.warning('The ledger lacks its last events: its file system does not answer.')
            self._files.close()

    def _record(self, events: list[ev.Event]) -> None:
        for event in events:
            _publish(event, self._recorders)
        _flush(self._recorders)


def _flush(subscribers: Sequence[Subscriber]) -> None:
    for subscriber in subscribers:
        try:
            subscriber.flush()
        except Exception:
            logger.exception('%s could not write', type(subscriber).__name__)


def _publish(event: ev.Event, subscribers: Sequence[Subscriber]) -> None:
    for subscriber in subscribers:
        try:
            subscriber.take(event)
        except Exception:
            logger.exception('%s could not take in %.300r', type(subscriber).__name__, event)
