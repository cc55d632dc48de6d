"""The standby ranks of one member of a fragment."""

from __future__ import annotations

import logging
from collections.abc import Callable

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.messages import FromRank

logger = logging.getLogger(__name__)


class NodeStandby:
    """Starts a node's standby ranks once for each fragment, and knows when they wait.

    Parameters
    ----------
    start
        Starts them, and returns a channel for each that becomes readable when it waits or has
        ended. Takes the number of seconds for which they wait.
    """

    def __init__(self, start: Callable[[float], list[Channel[FromRank]]]) -> None:
        self._start = start
        self._channels: list[Channel[FromRank]] = []  # of those that do not wait yet
        self._started = self._awaited = False

    def begin(self, wait_s: float, *, awaited: bool) -> None:
        """Start them unless that has been done. ``awaited``: somebody waits until they do."""
        self._awaited = self._awaited or awaited
        if self._started:
            return
        try:
            self._channels = self._start(wait_s)
            self._started = True
        except (FreeTrainError, OSError) as error:  # the next fragment starts without them
            logger.warning('No ranks run ahead of the next fragment: %s', error)

    def ready(self) -> bool:
        """Whether they are awaited, and all of them wait, or none could be started; True once."""
        for channel in [channel for channel in self._channels if channel.poll()]:
            channel.close()
            self._channels.remove(channel)
        if self._channels or not self._awaited:
            return False
        self._awaited = False
        return True

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
