"""Starting ranks in a fraction of a second: the client of a node's warm parent. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
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
from parsl_freetrain.training.liveness import StopWatch
from parsl_freetrain.training.warm_request import ServerRequest, start_environment

_LOG_LINES = 12
_RETRY_S = 0.02
_BACKLOG = 128
_LAUNCH_S = 120.0
_LOOK_S = 0.5
_STOPPED_S = 5.0   # after which a warm parent that is stopped is of no use any more


def address_of(name: str) -> bytes:
    """The abstract socket address of the warm parent ``name``; one per user."""
    digest = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f'\0parsl-freetrain-{os.geteuid()}-{digest}'.encode()


def listen(name: str) -> socket.socket | None:
    """Listen as the warm parent ``name``; None if another process does."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address_of(name))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    # Clients may connect from now on; they wait in the queue until torch is there.
    listener.listen(_BACKLOG)
    return listener


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
        self._owner_pid: int | None = None
        self._asked: Channel | None = None  # a template that has not answered yet

    @classmethod
    def start(cls, name: str, owner_pid: int, log: str, template: str | None = None) -> WarmParent:
        """Start a warm parent, unless one of this name listens; returns at once.

        It sees the environment, working directory and modules that the caller sees, and ends, with its ranks, when the process
        ``owner_pid`` ends. If several callers start one at the same time, one of them stays.

        Parameters
        ----------
        template
            Name of a warm parent on this computer that forks this one, which saves the import of torch; the new one has a session
            of its own and does not depend on the template's life. Where the template is not there or not fit, and always without one,
            a process is started, which stays in the caller's process group.
        """
        parent = cls(name, log)
        parent._owner_pid = owner_pid
        channel = parent._connect()
        if channel is not None:
            channel.close()
            return parent
        if template is not None:
            parent._asked = _ask(template, name, owner_pid, log)
        if parent._asked is None:
            parent._spawn()
        return parent

    @classmethod
    def start_template(cls, name: str, owner_pid: int, log: str) -> WarmParent:
        """As :meth:`start`, for one that is a template for others: they can ask it as soon as this returns.

        It has a session of its own, so that no signal from a terminal reaches it.
        """
        parent = cls(name, log)
        parent._owner_pid = owner_pid
        listener = listen(name)
        if listener is not None:
            with listener:
                parent._spawn('--listener-fd', str(listener.fileno()), pass_fds=(listener.fileno(),), start_new_session=True)
        return parent

    def _spawn(self, *options: str, pass_fds: tuple[int, ...] = (), start_new_session: bool = False) -> None:
        command = [sys.executable, '-P', '-m', 'parsl_freetrain.training.warm_server', '--name', self.name,
                   '--owner-pid', str(self._owner_pid), *options]
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, env=start_environment(),
                                             pass_fds=pass_fds, start_new_session=start_new_session)
        finally:
            os.close(fd)

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
            if self._asked is None:
                time.sleep(_RETRY_S)
            elif self._asked.poll(_RETRY_S):
                self._hear(self._asked)

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
        return RankProcess(*self._ask_for('launch', order, place, payload, env))

    def run_ahead(self, order: FragmentOrder, local_rank: int, payload: bytes, env: Mapping[str, str], log: str, wait_s: float) -> Channel:
        """Fork a rank that runs up to where it needs its fragment and waits there: for :meth:`launch`, which takes it if it fits.

        It is taken wherever it has come to by then, and killed when another trainer's rank is launched here.

        Parameters
        ----------
        order
            Of an earlier fragment of the trainer.
        local_rank, payload, env
            As it will be launched.
        log
            Where its output goes until then.
        wait_s
            It ends if it has waited for so many seconds.

        Returns
        -------
        Channel
            It can be read, or is at its end, when the rank waits. Closing it does not end the rank.

        Raises
        ------
        FreeTrainError
            If the warm parent is not there (any more) or cannot fork, or ranks of another trainer run here.
        """
        channel, _ = self._ask_for('ahead', order, RankPlace(-1, 0, local_rank, 0, log), payload, env, wait_s=wait_s)
        return channel

    def _ask_for(self, kind: str, order: FragmentOrder, place: RankPlace, payload: bytes, env: Mapping[str, str],
                 **more: float) -> tuple[Channel, int]:
        """A rank's channel and process id. It is sent what it runs only when it is there, and thus reads it."""
        channel = self._connect()
        if channel is None:
            raise self._failure('does not listen')
        digest = hashlib.blake2b(payload, digest_size=32).hexdigest()
        try:
            channel.send({'kind': kind, 'order': asdict(order), 'place': asdict(place), 'env': dict(env), 'payload': digest, **more})
            if not self._answered(channel, _LAUNCH_S):
                raise self._failure(f'did not start a rank within {_LAUNCH_S:g} s')
            answer = channel.recv()
            if not answer.get('has_payload'):
                channel.send_bytes(payload)
            return channel, int(answer['pid'])
        except (EOFError, KeyError) as error:
            channel.close()
            raise self._failure('could not start a rank') from error
        except BaseException:
            channel.close()
            raise

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the warm parent and its ranks at once, without waiting for its owner's end."""
        if self._asked is not None:
            self._asked.close()  # a template forks nothing for a caller that has gone
            self._asked = None
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

    def _hear(self, template: Channel) -> None:
        """Take the template's answer; where it is none, import torch after all."""
        try:
            answer = template.recv()
        except EOFError:
            answer = {'kind': 'refused'}
        template.close()
        self._asked = None
        if answer['kind'] == 'refused':
            self._spawn()
        elif answer['kind'] == 'ended':
            raise self._failure(f'ended with status {answer["status"]} before it was ready')

    def _connect(self) -> Channel | None:
        sock = _connected(self.name)
        if sock is None:
            return None
        if not is_ours(sock):
            sock.close()
            raise FreeTrainError(f'Another user listens at the address of warm parent {self.name!r}: choose another run directory.')
        return Channel(sock)

    def _wait_for_ready(self, channel: Channel, timeout_s: float) -> None:
        channel.send({'kind': 'ping'})
        if not self._answered(channel, timeout_s):
            raise self._failure(f'is not ready after {timeout_s:.0f} s')
        try:
            self.pid = channel.recv()['pid']
        except EOFError as error:
            raise self._failure('ended before it was ready') from error

    def _answered(self, channel: Channel, timeout_s: float) -> bool:
        """Wait for a message; a warm parent that is stopped would never send one, and is killed, so that the next caller starts another."""
        deadline = time.monotonic() + timeout_s
        watch = StopWatch(channel.peer_pid())
        while not channel.poll(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                return False
            if watch.stopped_s() >= _STOPPED_S:
                os.kill(channel.peer_pid(), signal.SIGKILL)
                raise self._failure(f'was stopped (SIGSTOP or SIGTSTP) for {_STOPPED_S:g} s and had to be killed')
        return True

    def _failure(self, what: str) -> FreeTrainError:
        try:
            lines = Path(self.log).read_text(errors='replace').splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        tail = ''.join(f'\n  {line}' for line in lines)
        return FreeTrainError(f'Warm parent {self.name!r} {what}; its log is {self.log}{":" if tail else " (empty)."}{tail}')


def _connected(name: str) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(address_of(name))
    except ConnectionError:
        sock.close()
        return None
    return sock


def _ask(template: str, name: str, owner_pid: int, log: str) -> Channel | None:
    """Ask a template for a warm parent; None if there is no template of ours to ask. The answer may take as long as its imports."""
    sock = _connected(template)
    if sock is None:
        return None
    channel = Channel(sock)
    # The environment may hold secrets: it goes to our own processes only.
    if is_ours(sock) and channel.send(ServerRequest.of_this_process(name, owner_pid, log).message()):
        return channel
    channel.close()
    return None
