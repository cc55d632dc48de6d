"""The stream of a run's events: appended to the journal, published, and kept for the controller."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from parsl_freetrain.core.model import events as ev

logger = logging.getLogger(__name__)


class Subscriber(Protocol):
    """Follows the events of a run. Only the event loop's thread calls it."""

    def take(self, event: ev.Event) -> None:
        """Handle one event; ignore those of no interest."""

    def flush(self) -> None:
        """Write down what is pending, since no more events are known now; by default, nothing."""
        return


class Stream:
    """Publishes to ``recorders``, then ``subscribers``; keeps what the controller gets."""

    def __init__(
        self, subscribers: Sequence[Subscriber], recorders: Sequence[Subscriber] = ()
    ) -> None:
        self.subscribers, self._recorders = list(subscribers), tuple(recorders)
        self._batch: list[ev.Event] = []

    def emit(self, *events: ev.Event) -> None:
        """Record and publish events; keep what concerns the controller for the next batch."""
        for event in events:
            if not isinstance(event, ev.NOTES):
                self._batch.append(event)
            _publish(event, [*self._recorders, *self.subscribers])

    def pass_by(self, event: ev.Event) -> None:
        """Publish an event that is neither recorded nor decided about."""
        _publish(event, self.subscribers)

    def next_batch(self) -> tuple[ev.Event, ...]:
        events, self._batch = tuple(self._batch), []
        return events

    def flush(self) -> None:
        for subscriber in (*self._recorders, *self.subscribers):
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
