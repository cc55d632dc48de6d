"""A rank, as seen by the process that launched it."""

from __future__ import annotations

import contextlib
import os
import signal

from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.spec.messages import FromRank, ToRank


class RankProcess:
    """A rank: its messages, and its end.

    Closing it kills the rank if it still runs, since nobody would receive its messages.
    """

    def __init__(self, channel: Channel[FromRank], pid: int) -> None:
        self.pid = pid
        self._channel = channel
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    def fileno(self) -> int:
        """For ``multiprocessing.connection.wait``: ready when :meth:`recv` has a message."""
        return self._channel.fileno()

    def send(self, message: ToRank) -> bool:
        """Send a message to the rank; False if it is gone."""
        return self._channel.send(message)

    def recv(self) -> FromRank | None:
        """Wait for the rank's next message; the last one is an
        :class:`~parsl_freetrain.training.spec.messages.Exit`. None: the message was not understood.
        Raises EOFError, after the exit, or if the fork server is gone (and the rank with it).
        """
        return self._channel.recv()

    def kill(self) -> None:
        """SIGKILL the rank, unless it has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close the connection, which ends the rank; may be called more than once."""
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
