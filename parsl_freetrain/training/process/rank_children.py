"""The ranks that a fork server has forked and that have a client."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from typing import Any

from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.linux import StopWatch
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.messages import Exit


@dataclass
class _Child:
    pid: int
    trainer: str
    channel: Channel[Any]
    client: StopWatch
    hang_s: float
    hung_up: bool = False


class RankChildren:
    """Reaps ranks, tells their clients how they ended, kills those whose client is gone."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._children: dict[int, _Child] = {}  # by pidfd
        self._by_channel: dict[int, _Child] = {}
        # Exit statuses that did not fit into the client's full socket yet.
        self._exits: dict[int, tuple[Channel[Any], int]] = {}
        self.killed = False  # whether a signal has ended one, and what it had started may live

    def __bool__(self) -> bool:
        return bool(self._children)

    def add(self, pid: int, pidfd: int, channel: Channel[Any], order: FragmentOrder) -> None:
        """Its pidfd is polled already; its client listens on the channel."""
        client = StopWatch(channel.peer_pid())
        child = _Child(pid, order.trainer, channel, client, order.hang_s)
        self._children[pidfd] = child
        self._by_channel[channel.fileno()] = child
        # POLLHUP, when the client has gone, is reported without being requested.
        self._poll.register(channel, 0)

    def handle(self, fd: int) -> None:
        if fd in self._children:
            self._reap(fd)
        elif fd in self._by_channel:
            self._abandoned(fd)
        elif fd in self._exits:
            self._send_exit(fd)

    def pids(self) -> set[int]:
        return {child.pid for child in self._children.values()}

    def trainers(self) -> set[str]:
        return {child.trainer for child in self._children.values()}

    def end_forsaken(self) -> None:
        """Kill ranks whose client is stopped: the executor trains elsewhere."""
        for child in self._children.values():
            if child.client.stopped_s() > child.hang_s:
                os.kill(child.pid, signal.SIGKILL)

    def forget(self) -> None:
        for pidfd, child in self._children.items():
            os.close(pidfd)
            child.channel.close()
        for channel, _ in self._exits.values():
            channel.close()

    def _reap(self, pidfd: int) -> None:
        child = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(child.pid, 0)
        self.killed |= os.WIFSIGNALED(status)
        fd = child.channel.fileno()
        del self._by_channel[fd]
        if child.hung_up:
            child.channel.close()
            return
        self._exits[fd] = (child.channel, os.waitstatus_to_exitcode(status))
        self._poll.modify(fd, select.POLLOUT)
        self._send_exit(fd)

    def _send_exit(self, fd: int) -> None:
        channel, status = self._exits[fd]
        if channel.send(Exit(status), wait=False) or channel.hung_up():
            del self._exits[fd]
            self._poll.unregister(fd)
            channel.close()

    def _abandoned(self, fd: int) -> None:
        child = self._by_channel[fd]
        if not child.channel.hung_up():
            return  # an event of an earlier connection with the same number
        child.hung_up = True
        self._poll.unregister(fd)
        os.kill(child.pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid
