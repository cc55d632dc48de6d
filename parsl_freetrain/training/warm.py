"""Starting ranks in a fraction of a second: the client of a node's warm parent. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parsl_freetrain.core.errors import FreeTrainError
from parsl_freetrain.training.channel import Channel, is_ours
from parsl_freetrain.training.fragment import FragmentOrder, RankPlace

_LOG_LINES = 12
_RETRY_S = 0.02


def address_of(name: str) -> bytes:
    """The abstract socket address of the warm parent ``name``; one per user."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f'\0parsl-freetrain-{os.geteuid()}-{digest}'.encode()


class RankProcess:
    """A rank: its messages, and its end.

    Closing it kills the rank if it still runs: a rank without anybody who listens is of no use.
    """

    def __init__(self, channel: Channel, pid: int) -> None:
        self.pid = pid
        self._channel = channel
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    def fileno(self) -> int:
        """For ``multiprocessing.connection.wait``: ready when :meth:`recv` has something."""
        return self._channel.fileno()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message to the rank; False if it is gone."""
        return self._channel.send(message)

    def recv(self) -> dict[str, Any]:
        """The rank's next message; the last one is ``{'kind': 'exit', 'status': ...}``.

        ``status`` is the exit status, or minus the signal that killed the rank.

        Raises
        ------
        EOFError
            After the exit, or if the warm parent is gone (and the rank with it).
        """
        return self._channel.recv()

    def kill(self) -> None:
        """SIGKILL; nothing happens if the rank is over."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End the connection, and with it the rank; may be called more than once."""
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class WarmParent:
    """A process of this node that has torch imported already and forks ranks.

    Parameters
    ----------
    name
        Tells apart the warm parents of one user on one node; all who use the same name share one.
    log
        Its log file, named in errors.
    process
        The process, where this object started one.

    Attributes
    ----------
    pid
        Process id of the warm parent, whoever started it; None before :meth:`wait_ready`.
    """

    def __init__(self, name: str, log: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name = name
        self.log = log
        self.pid: int | None = None
        self._process = process

    @classmethod
    def start(cls, name: str, owner_pid: int, log: str) -> WarmParent:
        """Start a warm parent, unless one of this name listens; returns at once.

        It stays in the caller's process group, sees the modules that the caller sees, and ends, with its ranks, when the process
        ``owner_pid`` ends. If several callers start one at the same time, one of them stays.
        """
        parent = cls(name, log)
        channel = parent._connect()
        if channel is not None:
            channel.close()
            return parent
        command = [sys.executable, '-P', '-m', 'parsl_freetrain.training.warm_server', '--name', name, '--owner-pid', str(owner_pid)]
        paths = [os.path.abspath(path) for path in sys.path]
        # numpy's threads would not survive a fork; the ranks' torch threads are set by the order.
        env = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths), 'OPENBLAS_NUM_THREADS': '1'}
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            parent._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, env=env)
        finally:
            os.close(fd)
        return parent

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until ranks can be launched.

        Raises
        ------
        FreeTrainError
            If that takes more than ``timeout_s`` seconds or the warm parent ended; with the log's path and last lines.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            channel = self._connect()
            if channel is not None:
                try:
                    self._wait_for_ready(channel, deadline - time.monotonic())
                finally:
                    channel.close()
                return
            if self._process is not None and self._process.poll():
                raise self._failure(f'ended with status {self._process.returncode} before it was ready')
            if time.monotonic() > deadline:
                raise self._failure(f'does not listen after {timeout_s:g} s')
            time.sleep(_RETRY_S)

    def launch(self, order: FragmentOrder, place: RankPlace, payload: bytes, env: Mapping[str, str]) -> RankProcess:
        """Fork a rank.

        Parameters
        ----------
        order, place
            What it is told.
        payload
            ``cloudpickle.dumps((function, args, kwargs))``; the rank calls ``function(ctx, *args, **kwargs)``.
        env
            Added to the rank's environment.

        Raises
        ------
        FreeTrainError
            If the warm parent is not there (any more) or cannot fork.
        """
        channel = self._connect()
        if channel is None:
            raise self._failure('does not listen')
        try:
            channel.send({'kind': 'launch', 'order': asdict(order), 'place': asdict(place), 'env': dict(env)})
            channel.send_bytes(payload)
            pid = channel.recv()['pid']
        except (EOFError, KeyError) as error:
            channel.close()
            raise self._failure('could not start a rank') from error
        return RankProcess(channel, pid)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the warm parent and its ranks at once, without waiting for its owner's end."""
        channel = self._connect()
        if channel is not None:
            channel.send({'kind': 'quit'})
            channel.poll(timeout_s)
            channel.close()
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _connect(self) -> Channel | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.connect(address_of(self.name))
        except ConnectionError:
            sock.close()
            return None
        if not is_ours(sock):
            sock.close()
            raise FreeTrainError(f'Another user listens at the address of warm parent {self.name!r}: choose another run directory.')
        return Channel(sock)

    def _wait_for_ready(self, channel: Channel, timeout_s: float) -> None:
        channel.send({'kind': 'ping'})
        if not channel.poll(max(timeout_s, 0.0)):
            raise self._failure(f'is not ready after {timeout_s:.0f} s')
        try:
            self.pid = channel.recv()['pid']
        except EOFError as error:
            raise self._failure('ended before it was ready') from error

    def _failure(self, what: str) -> FreeTrainError:
        try:
            lines = Path(self.log).read_text(errors='replace').splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        tail = ''.join(f'\n  {line}' for line in lines)
        return FreeTrainError(f'Warm parent {self.name!r} {what}; its log is {self.log}{":" if tail else " (empty)."}{tail}')
