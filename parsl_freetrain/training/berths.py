"""What a warm parent keeps between two fragments of a trainer: ranks that run ahead of the next, and the state that the last one left."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from parsl_freetrain.training.channel import Channel

WARM_VARIABLE = 'FREETRAIN_WARM'
"""Environment variable of a rank: the address of its node's warm parent, without the leading zero byte."""

KEPT_S = 60.0
"""A state that nobody fetches is let go of after so many seconds."""


@dataclass(frozen=True)
class Ahead:
    """A rank that runs ahead; ``key`` is what a launch must ask for to get it (empty: nobody gets it), ``log`` where its output goes."""

    key: str
    trainer: str
    pid: int
    pidfd: int
    sock: socket.socket
    log: str


@dataclass(frozen=True)
class _Kept:
    digest: str
    fd: int
    until: float


class Berths:
    """Ranks that run ahead, one per key, and states, one per trainer."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ahead] = {}   # by pidfd
        self._states: dict[str, _Kept] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks or self._states)

    def add(self, rank: Ahead) -> None:
        """A rank has been forked; one of the same key before it is not wanted any more."""
        self._dismiss(other for other in self._ranks.values() if other.key == rank.key)
        self._ranks[rank.pidfd] = rank

    def make_way(self, trainer: str) -> None:
        """This trainer has the node now, so nobody wants those that run ahead for others: they hold memory, also of GPUs."""
        self._dismiss(rank for rank in self._ranks.values() if rank.trainer != trainer)

    def claim(self, header: Mapping[str, Any], connection: socket.socket) -> Ahead | None:
        """Give the connection of a launch to a rank that has run ahead for it, or still does; None if there is none.

        Who launches is answered here: the rank looks at the connection only when it has come as far as it can.
        """
        key = key_of(header)
        rank = next((rank for rank in self._ranks.values() if rank.key == key and not _has_ended(rank.pidfd)), None)
        if rank is None:
            return None
        del self._ranks[rank.pidfd]
        with suppress(OSError):
            os.rename(rank.log, header['place']['log'])
        Channel(connection).send({'kind': 'pid', 'pid': rank.pid, 'has_payload': True}, wait=False)
        try:
            socket.send_fds(rank.sock, [json.dumps(header).encode()], [connection.fileno()], socket.MSG_DONTWAIT)
        except OSError:   # it ends just now, or will never know; who launches hears that it has died
            os.kill(rank.pid, signal.SIGKILL)
        rank.sock.close()
        return rank

    def ended(self, pidfd: int) -> bool:
        """Whether a process that has ended was such a rank; it is reaped."""
        rank = self._ranks.pop(pidfd, None)
        if rank is None:
            return False
        rank.sock.close()
        os.close(pidfd)
        os.waitpid(rank.pid, 0)
        with suppress(OSError):
            os.unlink(rank.log)
        return True

    def keep(self, header: Mapping[str, Any], connection: socket.socket) -> bool:
        """Take over a state in memory, in place of an earlier one of its trainer."""
        _, fds, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_DONTWAIT)
        if not fds:
            return False
        self._drop(str(header['trainer']))
        self._states[str(header['trainer'])] = _Kept(str(header['digest']), fds[0], time.monotonic() + KEPT_S)
        return True

    def give(self, header: Mapping[str, Any], connection: socket.socket) -> None:
        """Hand a state to who asks for it; it is not kept any longer."""
        kept = self._states.get(str(header['trainer']))
        if kept is not None and kept.digest == header['digest']:
            socket.send_fds(connection, [b'.'], [kept.fd], socket.MSG_DONTWAIT)
            self._drop(str(header['trainer']))

    def let_go(self) -> None:
        """Drop states that have been kept for too long."""
        now = time.monotonic()
        for trainer in [trainer for trainer, kept in self._states.items() if now >= kept.until]:
            self._drop(trainer)

    def forget(self) -> None:
        """In a child: nothing of this is its own."""
        for rank in self._ranks.values():
            rank.sock.close()
            os.close(rank.pidfd)
        for trainer in list(self._states):
            self._drop(trainer)

    def end(self) -> None:
        """Kill the ranks."""
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)

    def _dismiss(self, ranks: Iterable[Ahead]) -> None:
        """Kill ranks; they stay here until they are reaped."""
        for rank in list(ranks):
            os.kill(rank.pid, signal.SIGKILL)   # not reaped yet, so the pid is still its own
            self._ranks[rank.pidfd] = replace(rank, key='')

    def _drop(self, trainer: str) -> None:
        kept = self._states.pop(trainer, None)
        if kept is not None:
            os.close(kept.fd)


def key_of(header: Mapping[str, Any]) -> str:
    """What two requests must have in common for the rank of one to be of use to the other: all that is done before it is known."""
    order, place = header['order'], header['place']
    return json.dumps([header['payload'], place['local_rank'], header['env'],
                       *(order[name] for name in ('trainer', 'store', 'mode', 'seed', 'threads', 'ranks_per_node'))], sort_keys=True)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
