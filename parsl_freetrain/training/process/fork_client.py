"""The client of a node's fork server, and the ranks that it has launched. Imports no torch."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from parsl_freetrain.core.model.errors import FreeTrainError
from parsl_freetrain.host.files import open_log
from parsl_freetrain.training.process.channel import Channel, connect, is_ours, listen
from parsl_freetrain.training.process.fork_request import request_of_this_process, start_environment
from parsl_freetrain.training.process.linux import StopWatch
from parsl_freetrain.training.spec import fork_messages as fork
from parsl_freetrain.training.spec.fragment_order import FragmentOrder, RankPlace
from parsl_freetrain.training.spec.messages import Decoder, FromRank, RankPid

T = TypeVar('T')

_LOG_LINES = 12
_RETRY_S = 0.02
LAUNCH_S = 120.0
_LOOK_S = 0.5
_STOPPED_S = 5.0  # after which a stopped fork server is considered useless


class RankProcess(Channel[FromRank]):
    """A rank: the last message is an ``Exit``. For ``multiprocessing.connection.wait``, too."""

    def __init__(self, channel: Channel[FromRank], pid: int) -> None:
        super().__init__(channel._socket, channel._decoder)
        self.pid = pid
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    def kill(self) -> None:
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """End the rank, whose messages nobody would receive; may be called more than once."""
        super().close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class ForkClient:
    """A node's fork server of this name, shared by a user's clients; ``pid``: once it is ready."""

    def __init__(self, name: str, log: str, process: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self.log = name, log
        self.pid: int | None = None
        self.devices = 0
        self._process = process
        self._owner_pid: int | None = None
        self._answers: Decoder[fork.ForkAnswer] = Decoder(fork.ForkAnswer, f'fork server {name!r}')
        self._asked: Channel[fork.ForkAnswer] | None = None  # a template that has not answered yet

    @classmethod
    def start(cls, name: str, owner_pid: int, log: str, template: str | None = None) -> Self:
        """Start a fork server, unless one with this name is running; returns at once. It has the
        caller's environment, folder and modules, and ends, with its ranks, when ``owner_pid`` ends.
        A suitable ``template`` forks it, which saves importing torch; else a process is started.
        """
        parent = cls(name, log)
        parent._owner_pid = owner_pid
        channel = parent._connect(parent._answers)
        if channel is not None:
            channel.close()
            return parent
        if template is not None:
            parent._asked = parent._ask(template)
        if parent._asked is None:
            parent._spawn()
        return parent

    @classmethod
    def start_template(cls, name: str, owner_pid: int, log: str, new_session: bool = True) -> Self:
        """As :meth:`start`, for a template, which others can ask at once; in its own session."""
        parent = cls(name, log)
        parent._owner_pid = owner_pid
        listener = listen(name)
        if listener is not None:
            with listener:
                fd = listener.fileno()
                how = {'pass_fds': (fd,), 'start_new_session': new_session}
                parent._spawn('--listener-fd', str(fd), **how)
        return parent

    def _spawn(self, *options: str, **how: Any) -> None:
        command = [sys.executable, '-P', '-m', 'parsl_freetrain.training.process.fork_server']
        command += ['--name', self.name, '--owner-pid', str(self._owner_pid), *options]
        fd = open_log(self.log)
        try:
            how |= {'stdin': subprocess.DEVNULL, 'stdout': fd, 'stderr': fd}
            self._process = subprocess.Popen(command, env=start_environment(), **how)
        finally:
            os.close(fd)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for the fork server; FreeTrainError, with its log, if it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            channel = self._connect(self._answers)
            if channel is not None:
                with contextlib.closing(channel):
                    self._wait_for_ready(channel, deadline - time.monotonic())
                return
            if self._process is not None and self._process.poll():
                status = self._process.returncode
                raise self._failure(f'ended with status {status} before it was ready')
            if time.monotonic() > deadline:
                raise self._failure(f'does not listen after {timeout_s:g} s')
            if self._asked is None:
                time.sleep(_RETRY_S)
            elif self._asked.poll(_RETRY_S):
                self._handle_answer(self._asked)

    def launch(
        self, order: FragmentOrder, place: RankPlace, payload: bytes, env: Mapping[str, str]
    ) -> RankProcess:
        """Fork a rank that calls ``payload``'s function(ctx, ...); FreeTrainError if it cannot."""
        request = fork.Launch(order, place, env, _digest(payload))
        return RankProcess(*self._ask_for(request, payload))

    def start_standby(
        self,
        order: FragmentOrder,
        local_rank: int,
        payload: bytes,
        env: Mapping[str, str],
        log: str,
        wait_s: float,
    ) -> Channel[FromRank]:
        """Fork a standby rank for matching launches, until ``wait_s`` or another trainer's rank;
        its channel is readable, or ends, once it waits. FreeTrainError.
        """
        place = RankPlace(-1, 0, local_rank, 0, log)
        request = fork.Launch(order, place, env, _digest(payload), wait_s)
        channel, _ = self._ask_for(request, payload)
        return channel

    def _ask_for(self, request: fork.Launch, payload: bytes) -> tuple[Channel[FromRank], int]:
        """A rank's channel and process id. The payload is sent once the rank reads it."""
        decoder: Decoder[FromRank] = Decoder(FromRank, f'a rank of {request.order.trainer}')
        channel = self._connect(decoder)
        if channel is None:
            raise self._failure('does not listen')
        try:
            channel.send(request)
            answer = self._answer(channel, RankPid, LAUNCH_S)
            if answer is None:
                raise self._failure(f'did not start a rank within {LAUNCH_S:g} s')
            if not answer.has_payload:
                channel.send_bytes(payload)
            return channel, answer.pid
        except EOFError as error:
            channel.close()
            raise self._failure('could not start a rank') from error
        except BaseException:
            channel.close()
            raise

    def stop(self, timeout_s: float = 10.0) -> None:
        if self._asked is not None:
            self._asked.close()  # a template forks nothing for a caller that has gone
            self._asked = None
        channel = self._connect(self._answers)
        if channel is not None:
            channel.send(fork.Quit())
            channel.poll(timeout_s)
            channel.close()
        if self._process is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _handle_answer(self, template: Channel[fork.ForkAnswer]) -> None:
        """If the template refused, start a process that imports torch."""
        try:
            answer = template.recv()
        except EOFError:
            answer = None
        template.close()
        self._asked = None
        if answer is None or isinstance(answer, fork.Refused):
            self._spawn()
        elif isinstance(answer, fork.ForkServerEnded):
            raise self._failure(f'ended with status {answer.status} before it was ready')

    def _ask(self, template: str) -> Channel[fork.ForkAnswer] | None:
        """Ask a template, whose answer may take as long as its imports; None: there is none."""
        sock = connect(template)
        if sock is None:
            return None
        channel = Channel(sock, self._answers)
        assert self._owner_pid is not None
        request = request_of_this_process(self.name, self._owner_pid, self.log)
        # The environment may hold secrets, so it is sent to processes of this user only.
        if is_ours(sock) and channel.send(request):
            return channel
        channel.close()
        return None

    def _connect(self, decoder: Decoder[T]) -> Channel[T] | None:
        sock = connect(self.name)
        if sock is None:
            return None
        if not is_ours(sock):
            sock.close()
            raise FreeTrainError(
                f'Another user listens at the address of fork server {self.name!r}: '
                'choose another run directory.'
            )
        return Channel(sock, decoder)

    def _wait_for_ready(self, channel: Channel[fork.ForkAnswer], timeout_s: float) -> None:
        channel.send(fork.Ping())
        try:
            answer = self._answer(channel, fork.Ready, timeout_s)
        except EOFError as error:
            raise self._failure('ended before it was ready') from error
        if answer is None:
            raise self._failure(f'is not ready after {timeout_s:.0f} s')
        self.pid, self.devices = answer.pid, answer.devices

    def _answer(self, channel: Channel[Any], kind: type[T], timeout_s: float) -> T | None:
        """The first message of this kind; None: not in time. A stopped fork server is killed."""
        deadline = time.monotonic() + timeout_s
        watch = StopWatch(channel.peer_pid())
        while True:
            left_s = deadline - time.monotonic()
            if channel.poll(max(0.0, min(_LOOK_S, left_s))):
                answer = channel.recv()
                if isinstance(answer, kind):
                    return answer
            if left_s <= 0:
                return None
            if watch.stopped_s() >= _STOPPED_S:
                os.kill(channel.peer_pid(), signal.SIGKILL)
                raise self._failure(
                    f'was stopped (SIGSTOP or SIGTSTP) for {_STOPPED_S:g} s and had to be killed'
                )

    def _failure(self, what: str) -> FreeTrainError:
        try:
            lines = Path(self.log).read_text(errors='replace').splitlines()[-_LOG_LINES:]
        except OSError:
            lines = []
        tail = ''.join(f'\n  {line}' for line in lines)
        return FreeTrainError(
            f'Fork server {self.name!r} {what}; its log is '
            f'{self.log}{":" if tail else " (empty)."}{tail}'
        )


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=32).hexdigest()
