"""What a fork server keeps: ranks with a client, standby ranks, and each trainer's last state."""

import json
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from parsl_freetrain.training.process.channel import Channel
from parsl_freetrain.training.process.linux import StopWatch
from parsl_freetrain.training.spec import fork_messages as fork
from parsl_freetrain.training.spec.fragment_order import FragmentOrder
from parsl_freetrain.training.spec.messages import Exit, RankPid, encode


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
        child = _Child(pid, order.trainer, channel, StopWatch(channel.peer_pid()), order.hang_s)
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


FORK_SERVER_VARIABLE = 'FREETRAIN_FORK_SERVER'
"""Variable of a rank: the address of its node's fork server, without the leading zero byte."""

KEPT_S = 60.0  # seconds after which a state that has not been fetched is dropped
ALONE_S = 180.0  # seconds after which standby ranks end whose trainer has no rank on the node

_Name = tuple[str, str]  # a trainer, and a file of its state


@dataclass(frozen=True)
class StandbyRank:
    """Only a launch with its ``key`` gets it (empty: none does); ``log``: file of its output."""

    key: str
    trainer: str
    pid: int
    pidfd: int
    channel: Channel[Any]
    log: str


@dataclass(frozen=True)
class _Kept:
    digest: str
    fd: int
    until: float


class StandbySlots:
    """Standby ranks, one per key, and files of states, by trainer and name."""

    def __init__(self) -> None:
        self._ranks: dict[int, StandbyRank] = {}  # by pidfd
        self._states: dict[_Name, _Kept] = {}
        self._alone_since: dict[str, float] = {}  # by trainer of standby ranks
        # the best by trainer and part: fragment, samples, whether it has what no other rank has
        self._offers: dict[tuple[str, int], tuple[int, int, bool]] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks or self._states)

    def pids(self) -> set[int]:
        return {rank.pid for rank in self._ranks.values()}

    def add(self, rank: StandbyRank) -> None:
        """Also kills an earlier one with the same key."""
        self._dismiss(other for other in self._ranks.values() if other.key == rank.key)
        self._ranks[rank.pidfd] = rank

    def make_way(self, trainer: str) -> None:
        """Kill other trainers' standby ranks, which hold memory, also on GPUs."""
        self._dismiss(rank for rank in self._ranks.values() if rank.trainer != trainer)

    def claim(self, request: fork.Launch, channel: Channel[Any]) -> StandbyRank | None:
        """Pass a launch to a matching standby rank (None: there is none), and answer the client."""
        key = key_of(request)
        found = (r for r in self._ranks.values() if r.key == key and not _has_ended(r.pidfd))
        if (rank := next(found, None)) is None:
            return None
        del self._ranks[rank.pidfd]
        with suppress(OSError):
            os.rename(rank.log, request.place.log)
        channel.send(RankPid(rank.pid, has_payload=True), wait=False)
        try:
            rank.channel.send_fd(channel.fileno(), encode(request), wait=False)
        except OSError:  # the rank is just ending; the client will hear that it has died
            os.kill(rank.pid, signal.SIGKILL)
        rank.channel.close()
        return rank

    def ended(self, pidfd: int) -> bool:
        """Reap a process if it was a standby rank; False if it was not."""
        rank = self._ranks.pop(pidfd, None)
        if rank is None:
            return False
        rank.channel.close()
        os.close(pidfd)
        os.waitpid(rank.pid, 0)
        with suppress(OSError):
            os.unlink(rank.log)
        return True

    def wants(self, offer: fork.OfferState) -> bool:
        """Whether it is the best so far on this node, so that only one rank makes a copy."""
        if _rank_of(offer) <= self._best(offer):
            return False
        self._offers[offer.trainer, offer.part] = _rank_of(offer)
        return True

    def _best(self, offer: fork.OfferState) -> tuple[int, int, bool]:
        return self._offers.get((offer.trainer, offer.part), (-1, -1, False))

    def keep(self, request: fork.KeepState, channel: Channel[Any]) -> bool:
        _, fd = channel.recv_fd(wait=False)
        if fd is None:
            return False
        offer = request.offer
        if offer is not None and _rank_of(offer) < self._best(offer):
            os.close(fd)
            return False
        name = request.trainer, request.file
        self._drop(name)
        self._states[name] = _Kept(request.digest, fd, time.monotonic() + KEPT_S)
        return True

    def give(self, request: fork.FetchState, channel: Channel[Any]) -> None:
        """Send a file to the client, and stop keeping it unless it is to be kept."""
        for name, kept in list(self._states.items()):
            if name[0] == request.trainer and kept.digest == request.digest:
                channel.send_fd(kept.fd, wait=False)
                if request.keep:
                    self._states[name] = replace(kept, until=time.monotonic() + KEPT_S)
                else:
                    self._drop(name)
                return

    def drop_old_states(self) -> None:
        now = time.monotonic()
        for name in [name for name, kept in self._states.items() if now >= kept.until]:
            self._drop(name)

    def dismiss_forsaken(self, trainers: Collection[str], now: float) -> None:
        """Kill standby ranks of trainers without a rank here (``trainers`` have one at ``now``)."""
        alone = {rank.trainer for rank in self._ranks.values()}.difference(trainers)
        self._alone_since = {name: self._alone_since.get(name, now) for name in alone}
        gone = {name for name, since in self._alone_since.items() if now - since > ALONE_S}
        self._dismiss(rank for rank in self._ranks.values() if rank.trainer in gone)

    def forget(self) -> None:
        for rank in self._ranks.values():
            rank.channel.close()
            os.close(rank.pidfd)
        for name in list(self._states):
            self._drop(name)

    def _dismiss(self, ranks: Iterable[StandbyRank]) -> None:
        """They stay registered until they are reaped."""
        for rank in list(ranks):
            os.kill(rank.pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid
            self._ranks[rank.pidfd] = replace(rank, key='')

    def _drop(self, name: _Name) -> None:
        kept = self._states.pop(name, None)
        if kept is not None:
            os.close(kept.fd)


def key_of(request: fork.Launch) -> str:
    """What must be the same for a standby rank to be usable: all that affects what it has done."""
    order, env = request.order, dict(request.env)
    spec = msgspec.to_builtins(order.spec, str_keys=True)
    what = [request.payload, request.place.local_rank, env, order.trainer, order.store, spec]
    return json.dumps(what, sort_keys=True)


def _rank_of(offer: fork.OfferState) -> tuple[int, int, bool]:
    return offer.fragment, offer.samples, offer.alone


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
